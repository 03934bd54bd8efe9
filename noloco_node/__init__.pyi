from noloco_node.api.gossip_optimizer import GossipOptimizer as GossipOptimizer
from noloco_node.api.peer import join as join
from noloco_node.api.run_files import init as init
from noloco_node.api.swarm import Swarm as Swarm
from noloco_node.api.swarm import export as export
from noloco_node.api.trainer_callback import GossipCallback as GossipCallback

__version__: str
