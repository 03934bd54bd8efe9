"""When a simulated swarm has come to a standstill for good, and how that is said.

A stage whose replicas all left for ever stops the whole run: nobody can step, nobody is wrong, and the others look for
it as long as they live. In virtual time that is a day of looking. So the world ends when nobody has taken an inner step
for `patience_s` and no fault is left that could change it. A run that is only slow must never be taken for one that
stands still: the patience is many times what a window and a copy of the weights take on its slowest machine and line.
"""

from __future__ import annotations

from collections.abc import Mapping

from noloco_node.sim.peer import SimulatedPeer
from noloco_node.sim.scenario import faults
from noloco_node.sim.scenario.setup import SimSetup

LEAST_S = 1800.0
REFRESHES = 20
TIMES = 20
"""As long as the slowest window and copy of the weights."""
TRIPS = 4
"""Latencies of a call: its stream is opened, it goes there and back."""
MOST_NAMES = 20


def patience_s(setting: SimSetup) -> float:
    """Return after how many virtual seconds without an inner step nobody will ever take one."""
    scenario, pipeline = setting.scenario, setting.run.pipeline
    devices, line = scenario.devices, setting.access()
    slowness, pause_s = max(devices.slowness), devices.stutter_pause_s
    slowest, slowest_pause_s = 1.0, 0.0
    bytes_per_s = min(line.up_bytes_per_s, line.down_bytes_per_s)
    for fault in setting.faults:
        match fault:
            case faults.Slow():
                slowest = max(slowest, fault.factor)
            case faults.StutterFault():
                slowest_pause_s = max(slowest_pause_s, fault.pause_s)
            case faults.LinkFault():
                rates = [rate for rate in (fault.up_bytes_per_s, fault.down_bytes_per_s) if rate is not None]
                bytes_per_s = min([bytes_per_s, *rates])
    job_s = max(prices.forward_s for prices in setting.prices) * slowness * slowest
    pass_s = 3 * job_s + 2 * max(pause_s, slowest_pause_s)
    there_and_back = setting.sizes.microbatch_bytes + setting.sizes.gradient_bytes
    # All replicas of a stage may send to the same one.
    way_s = there_and_back * pipeline.replicas / bytes_per_s + TRIPS * scenario.network.latency.mean_s
    window_s = pipeline.microbatches_per_step * pipeline.stages * (pass_s + way_s)
    copy_s = setting.sizes.largest_state_bytes / bytes_per_s
    return max(LEAST_S, REFRESHES * scenario.swarm.refresh_s, TIMES * (window_s + copy_s))


def sentence(peers: Mapping[str, SimulatedPeer], stages: int, since_s: float) -> str:
    """Say who waits for ever, and for what; `since_s` is the virtual time of the last inner step."""
    waiting = [peer.name for peer in peers.values() if peer.running]
    served = {peer.stage for peer in peers.values() if peer.running and peer.replica}
    bare = [str(stage) for stage in range(stages) if stage not in served]
    text = f"Nobody took an inner step after {since_s:,.0f} s, and no fault was left that could have changed it"
    if bare:
        text += f": nobody serves stage{'s' * (len(bare) > 1)} {', '.join(bare)}"
    names = ", ".join(waiting[:MOST_NAMES])
    more = len(waiting) - MOST_NAMES
    return f"{text}. {names}{f' and {more} more' if more > 0 else ''} waited for ever."
