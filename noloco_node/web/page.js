// Draws the frames that the node sends; decides nothing. What strangers said comes in as text and is set as text.
"use strict";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let frame = null;
let chosen = null; // id of the peer that is looked at
let order = { column: "tokens", down: true };

// Words and figures.

const english = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const brief = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const percent = (share) => (share === null ? "" : `${(100 * share).toFixed(0)} %`);
const fixed = (value, digits) => (value === null ? "" : value.toFixed(digits));
const figure = (value) => (Math.abs(value) >= 1000 ? brief.format(value) : String(Number(value.toPrecision(3))));

function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const clock = (at) => (frame.virtual ? span(at) : new Date(1000 * at).toLocaleTimeString("en-GB"));
const speed = (perSecond) => (perSecond < 10 ? figure(perSecond) : english.format(perSecond));
const counted = (number) => (number === null ? "" : brief.format(number));
const rate = (bytes) => (bytes === null ? "" : scaled(8 * bytes, "bit/s"));
const energy = (joules) => (joules === null ? "" : scaled(joules / 3600, "Wh"));

function scaled(value, unit) {
  const step = Math.min(4, Math.floor(Math.log10(Math.max(1, value)) / 3));
  return `${Number((value / 1000 ** step).toPrecision(3))} ${["", "k", "M", "G", "T"][step]}${unit}`;
}

function kind(peer) {
  if (peer.state === "gone" || peer.state === "finished") return peer.state;
  if (!peer.trains) return "joining";
  return peer.waits === null ? "training" : "waiting";
}

// Elements.

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

// Children of `parent`, one for each of `things`: kept by their key, made where they are new, removed where they are old.
function sync(parent, things, keyOf, make, update) {
  const kept = (parent.kept ??= new Map());
  const seen = new Set();
  let place = null;
  for (const thing of things) {
    let key = keyOf(thing);
    while (seen.has(key)) key += "'"; // strangers may claim the id of another
    seen.add(key);
    let child = kept.get(key);
    const isNew = !child;
    if (isNew) kept.set(key, (child = make(thing)));
    const next = place ? place.nextSibling : parent.firstChild;
    if (next !== child) parent.insertBefore(child, next);
    update(child, thing, isNew);
    place = child;
  }
  for (const [key, child] of kept) {
    if (!seen.has(key)) {
      child.remove();
      kept.delete(key);
    }
  }
}

const svg = (name, attributes = {}) => set(document.createElementNS(SVG, name), attributes);

function text(x, y, words, attributes = {}) {
  const element = svg("text", { x, y, ...attributes });
  element.textContent = words;
  return element;
}

// The summary.

function drawSummary() {
  write(byId("name"), frame.name);
  document.title = `${percent(frame.progress)} ${frame.name}`;
  write(byId("run-id"), frame.run_id && `run ${frame.run_id}`);
  write(byId("clock"), clock(frame.at));
  byId("trouble").hidden = frame.trouble === null;
  write(byId("trouble"), frame.trouble ?? "");
  const sentence = byId("bottleneck");
  write(sentence, frame.bottleneck);
  sentence.className = frame.progress >= 1 || frame.left === "over" ? "over" : frame.tokens_per_s <= 0 ? "stuck" : "";
  set(byId("bar"), { "aria-valuenow": Math.round(100 * frame.progress) });
  byId("bar").firstElementChild.style.width = `${100 * frame.progress}%`;
  const there = frame.stages.reduce((sum, stage) => sum + stage.replicas, 0);
  const budget = frame.budget_tokens === null ? "" : ` of ${brief.format(frame.budget_tokens)}`;
  const figures = [
    ["progress", `${(100 * frame.progress).toFixed(1)} %`],
    ["tokens a second", speed(frame.tokens_per_s)],
    ["time", frame.left],
    ["tokens", brief.format(frame.tokens) + budget],
    ["loss", fixed(frame.loss, 3) || "–"],
    ...(frame.held_out === null ? [] : [["held-out loss", fixed(frame.held_out, 3)]]),
    ["gap", frame.gap === null ? "–" : figure(frame.gap)],
    ["peers", `${about(there, frame.stages)} at ${frame.stages.length} stage${frame.stages.length === 1 ? "" : "s"}`],
  ];
  const make = () => {
    const box = document.createElement("div");
    box.append(document.createElement("dt"), document.createElement("dd"));
    return box;
  };
  sync(byId("figures"), figures, ([name]) => name, make, (box, [name, value]) => {
    write(box.firstChild, name);
    write(box.lastChild, value);
  });
}

// Curves.

function drawCurve(id, values, shown, fromZero) {
  const picture = byId(id);
  const [width, height, left, below] = [picture.clientWidth || 300, picture.clientHeight || 112, 54, 16];
  set(picture, { viewBox: `0 0 ${width} ${height}` });
  const points = frame.course.at.map((at, number) => [at, values[number]]).filter((point) => point[1] !== null);
  picture.replaceChildren();
  set(picture, { "aria-label": `${points.length} values, now ${shown}` });
  if (points.length < 2) return;
  const times = points.map((point) => point[0]);
  const [begin, end] = [Math.min(...times), Math.max(...times)]; // the clock may have been set back
  const heights = points.map((point) => point[1]);
  let low = fromZero ? 0 : Math.min(...heights);
  let high = Math.max(...heights);
  if (fromZero && high <= 0) high = 1;
  if (high - low < 1e-12) [low, high] = [low - 0.5 * Math.abs(low || 1), high + 0.5 * Math.abs(high || 1)];
  const x = (at) => left + ((width - left - 4) * (at - begin)) / Math.max(end - begin, 1e-9);
  const y = (value) => height - below - ((height - below - 8) * (value - low)) / (high - low);
  for (const value of [low, (low + high) / 2, high]) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width, y1: y(value), y2: y(value) }));
    picture.append(text(left - 5, y(value) + 4, figure(value), { class: "quiet", "text-anchor": "end" }));
  }
  picture.append(text(left, height - 2, clock(begin), { class: "quiet" }));
  picture.append(text(width - 4, height - 2, clock(end), { class: "quiet", "text-anchor": "end" }));
  const line = points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  picture.append(svg("polyline", { class: "curve", points: line }));
}

function drawCurves() {
  const shown = [fixed(frame.loss, 3), speed(frame.tokens_per_s), frame.gap === null ? "" : figure(frame.gap)];
  ["loss-now", "speed-now", "gap-now"].forEach((id, number) => write(byId(id), shown[number]));
  drawCurve("loss", frame.course.loss, shown[0], false);
  byId("held-out").parentElement.hidden = frame.held_out === null;
  write(byId("held-out-now"), fixed(frame.held_out, 3));
  drawCurve("held-out", frame.course.held_out, fixed(frame.held_out, 3), false);
  drawCurve("rate", frame.course.tokens_per_s, shown[1], true);
  drawCurve("gap", frame.course.gap, shown[2], true);
}

// The map.

const HEAD = 62; // above the peers of a column

function layout(width) {
  const columns = frame.stages.map((stage) => frame.peers.filter((peer) => peer.stage === stage.stage));
  const most = Math.max(1, ...columns.map((column) => column.length));
  const step = Math.min(130, Math.max(13, 560 / most));
  const breadth = Math.max(66, width / columns.length);
  const places = new Map();
  columns.forEach((column, number) => {
    const top = HEAD + ((most - column.length) * step) / 2 + step / 2;
    column.forEach((peer, row) => places.set(peer, { x: breadth * (number + (breadth >= 150 ? 0.35 : 0.45)), y: top + row * step }));
  });
  return { columns, step, breadth, places, width: breadth * columns.length, height: HEAD + most * step + 8 };
}

function radius(peer, column, step) {
  const even = peer.share === null || !column.length ? 0 : Math.sqrt(Math.min(4, peer.share * column.length));
  return (0.16 + 0.17 * even) * Math.min(step, 36) + 1.5;
}

function drawMap() {
  const picture = byId("map");
  const { columns, step, breadth, places, width, height } = layout(picture.parentElement.clientWidth - 2);
  if (!picture.firstChild) {
    for (const name of ["stages", "routes", "meetings", "nodes"]) picture.append((picture[name] = svg("g")));
  }
  set(picture, { viewBox: `0 0 ${width} ${height}` });
  picture.style.width = `${width}px`;
  picture.style.height = `${height}px`;
  drawStages(picture.stages, breadth, height);
  drawRoutes(picture.routes, places);
  drawMeetings(picture.meetings, places, breadth);
  const named = breadth >= 150 && step >= 14;
  sync(picture.nodes, [...places.keys()], (peer) => peer.id, makeNode, (node, peer) => {
    const { x, y } = places.get(peer);
    const r = radius(peer, columns[peer.stage], step);
    const mark = peer.id === chosen ? " chosen" : "";
    set(node, { class: `peer ${kind(peer)}${mark}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    set(node.circle, { r: r.toFixed(1) });
    const above = step >= 40;
    const place = above ? { x: 0, y: -r - 5, "text-anchor": "middle" } : { x: 0.33 * step + 7, y: 4, "text-anchor": "start" };
    set(node.label, place);
    write(node.label, named ? peer.name.slice(0, Math.floor(((above ? 0.7 : 0.62) * breadth - 16) / 7)) : "");
    write(node.tip, tip(peer));
    node.peer = peer;
  });
  set(picture, { "aria-label": frame.stages.map((s) => `stage ${s.stage}: ${s.replicas} replicas`).join(", ") });
  write(byId("routes-key"), frame.routes_told);
}

function tip(peer) {
  const parts = [`${peer.name} (${peer.id})`, `stage ${peer.stage}, ${peer.state}`];
  if (peer.waits !== null) parts.push(`waits: ${peer.waits}`);
  parts.push(`${speed(peer.tokens_per_s)} tokens/s`);
  return parts.join("\n");
}

function makeNode() {
  const node = svg("g");
  node.tip = svg("title");
  node.circle = svg("circle");
  node.label = svg("text", { y: 4, class: "quiet" });
  node.append(node.tip, node.circle, svg("path", { d: "M-4 -4L4 4M-4 4L4 -4" }), node.label);
  node.addEventListener("click", () => choose(node.peer.id));
  return node;
}

function about(count, stages) {
  const all = stages.reduce((sum, stage) => sum + stage.replicas, 0);
  const error = Math.hypot(...stages.map((stage) => stage.replicas * stage.error)) / Math.max(1, all);
  return error > 0 ? `≈ ${brief.format(count)} ± ${Math.round(200 * error)} %` : `${count}`;
}

function drawStages(group, breadth, height) {
  group.replaceChildren();
  frame.stages.forEach((stage, number) => {
    const x = breadth * number;
    const limits = stage.stage === frame.limit && frame.progress < 1;
    group.append(svg("rect", { class: `column${limits ? " limit" : ""}`, x: x + 2, y: 0, width: breadth - 4, height, rx: 8 }));
    const away = stage.replicas - stage.training;
    const census = frame.progress >= 1 ? `${about(stage.replicas, [stage])} there` : stage.replicas ? `${about(stage.training, [stage])}${away ? ` + ${away} idle` : " at work"}` : "nobody";
    group.append(text(x + 10, 16, `stage ${stage.stage}`, { class: "title" }));
    group.append(text(x + 10, 31, census, { class: stage.training || frame.progress >= 1 ? "quiet" : "quiet empty" }));
    if (limits && breadth >= 130) {
      group.append(text(x + breadth - 10, 16, "the limit", { class: "limit-word", "text-anchor": "end" }));
    }
    if (stage.busy !== null) {
      const narrow = breadth < 110;
      const whole = narrow ? breadth - 20 : Math.min(breadth - 20, 150) - 42;
      const level = stage.busy >= 0.9 ? "high" : stage.busy < 0.5 ? "low" : "";
      group.append(svg("rect", { class: "load", x: x + 10, y: 38, width: whole, height: 8, rx: 4 }));
      group.append(svg("rect", { class: `load-used ${level}`, x: x + 10, y: 38, width: Math.max(0, whole * stage.busy), height: 8, rx: 4 }));
      if (!narrow) group.append(text(x + 14 + whole, 46, percent(stage.busy), { class: "quiet" }));
    }
  });
}

function drawRoutes(group, places) {
  const most = Math.max(1e-9, ...frame.routes.map((route) => route[2]));
  const routes = frame.routes.map(([from, to, speed]) => ({ from: frame.peers[from], to: frame.peers[to], speed }));
  const drawn = routes.filter(({ from, to }) => places.has(from) && places.has(to));
  const crowd = Math.min(1, Math.sqrt(60 / Math.max(1, drawn.length))); // many lines together are as dark as few
  sync(group, drawn, ({ from, to }) => `${from.id} ${to.id}`, () => svg("path"), (path, { from, to, speed }) => {
    const [a, b] = [places.get(from), places.get(to)];
    const bend = 0.45 * (b.x - a.x);
    const strength = speed / most;
    const faded = chosen !== null && from.id !== chosen && to.id !== chosen;
    set(path, {
      class: `route${faded ? " faded" : ""}`,
      d: `M${a.x.toFixed(1)} ${a.y.toFixed(1)}C${(a.x + bend).toFixed(1)} ${a.y.toFixed(1)} ${(b.x - bend).toFixed(1)} ${b.y.toFixed(1)} ${b.x.toFixed(1)} ${b.y.toFixed(1)}`,
      "stroke-width": (0.4 + (0.6 + 2.4 * crowd) * strength).toFixed(2),
      opacity: (0.04 + (0.26 + 0.4 * crowd) * strength).toFixed(2),
    });
  });
}

function drawMeetings(group, places, breadth) {
  const pairs = new Map();
  for (const peer of frame.peers) {
    const partner = peer.met === null ? undefined : frame.peers[peer.met];
    if (!partner || partner === peer || partner.stage !== peer.stage || !places.has(peer) || !places.has(partner)) continue;
    const [first, second] = peer.id < partner.id ? [peer, partner] : [partner, peer];
    const known = pairs.get(`${first.id} ${second.id}`);
    pairs.set(`${first.id} ${second.id}`, { first, second, round: Math.max(peer.round, known ? known.round : 0) });
  }
  sync(group, [...pairs], ([key]) => key, () => svg("path"), (path, [, { first, second, round }], isNew) => {
    const [a, b] = [places.get(first), places.get(second)];
    const bulge = a.x - Math.min(0.38 * breadth, 10 + 0.3 * Math.abs(a.y - b.y));
    const faded = chosen !== null && first.id !== chosen && second.id !== chosen;
    const met = isNew || path.round !== round;
    set(path, {
      class: `meeting${faded ? " faded" : ""}${met ? " new" : ""}`,
      d: `M${a.x.toFixed(1)} ${a.y.toFixed(1)}Q${bulge.toFixed(1)} ${((a.y + b.y) / 2).toFixed(1)} ${b.x.toFixed(1)} ${b.y.toFixed(1)}`,
    });
    path.round = round;
  });
}

// Peers.

const COLUMNS = [
  ["name", "peer", (peer) => peer.name],
  ["stage", "stage", (peer) => peer.stage, (peer) => String(peer.stage)],
  ["state", "state", (peer) => peer.state],
  ["tokens", "tokens, claimed", (peer) => peer.tokens, (peer) => brief.format(peer.tokens)],
  ["signed", "signed", (peer) => peer.tokens_signed ?? -1, (peer) => counted(peer.tokens_signed)],
  ["tokens_per_s", "tokens/s", (peer) => peer.tokens_per_s, (peer) => speed(peer.tokens_per_s)],
  ["share", "of its stage", (peer) => peer.share ?? -1, (peer) => percent(peer.share)],
  ["waits", "waits for", (peer) => peer.waits_s ?? (peer.waits === null ? -1 : 0), (peer) => waits(peer)],
  ["busy", "at work", (peer) => peer.busy ?? -1, (peer) => percent(peer.busy)],
  ["line", "line up / down", (peer) => peer.sent_per_s ?? -1, (peer) => line(peer)],
  ["round", "round", (peer) => peer.round, (peer) => String(peer.round)],
  ["loss", "loss", (peer) => peer.loss ?? -1, (peer) => fixed(peer.loss, 3)],
  ["held_out", "held-out loss", (peer) => peer.held_out ?? -1, (peer) => fixed(peer.held_out, 3)],
  ["gap", "gap", (peer) => peer.gap ?? -1, (peer) => fixed(peer.gap, 4)],
  ["there", "time there", (peer) => peer.there_s ?? -1, (peer) => (peer.there_s === null ? "" : span(peer.there_s))],
  ["bytes", "bytes", (peer) => peer.line_bytes ?? -1, (peer) => (peer.line_bytes === null ? "" : scaled(peer.line_bytes, "B"))],
  ["energy", "energy", (peer) => peer.joules ?? -1, (peer) => energy(peer.joules)],
];
const WORDS = new Set(["name", "state", "waits"]);

const line = (peer) => (peer.sent_per_s === null ? peer.budget ?? "" : `${rate(peer.sent_per_s)} / ${rate(peer.received_per_s)}`);
const waits = (peer) => (peer.waits === null ? "" : `${peer.waits_s === null ? "" : `${span(peer.waits_s)} `}${peer.waits}`);

function makeHeadings() {
  for (const [column, title] of COLUMNS) {
    const cell = document.createElement("th");
    const button = document.createElement("button");
    button.textContent = title;
    button.addEventListener("click", () => {
      order = { column, down: order.column === column ? !order.down : !WORDS.has(column) || column === "waits" };
      drawPeers();
    });
    cell.className = WORDS.has(column) ? "" : "number";
    cell.scope = "col";
    cell.column = column;
    cell.append(button);
    byId("columns").append(cell);
  }
}

function makeRow() {
  const row = document.createElement("tr");
  for (const [column] of COLUMNS) {
    const cell = document.createElement("td");
    cell.className = WORDS.has(column) ? (column === "waits" ? "words" : "") : "number";
    row.append(cell);
  }
  const button = document.createElement("button");
  button.addEventListener("click", () => choose(row.peer.id));
  row.firstChild.append(button);
  row.button = button;
  return row;
}

function drawPeers() {
  for (const cell of byId("columns").children) {
    if (cell.column === "busy") write(cell.firstChild, frame.busy_name);
    if (cell.column === order.column) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  const value = COLUMNS.find(([column]) => column === order.column)[2];
  const sign = order.down ? -1 : 1;
  const compare = (a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : a.id < b.id ? -1 : 1);
  sync(byId("rows"), [...frame.peers].sort(compare), (peer) => peer.id, makeRow, (row, peer) => {
    row.peer = peer;
    row.className = peer.id === chosen ? "chosen" : "";
    write(row.button, peer.name);
    set(row.button, { title: `${peer.name}: short id ${peer.id}`, "aria-pressed": peer.id === chosen });
    COLUMNS.slice(1).forEach(([, , raw, shown], number) => write(row.children[number + 1], (shown ?? raw)(peer)));
    row.children[2].className = `state-${kind(peer) === "waiting" ? "training" : kind(peer)}`;
  });
  const more = frame.more_peers;
  write(byId("more-peers"), more ? `and ${english.format(more)} more peers; shown first are those that do not train, or wait` : "");
  const { tokens, drawn, signed, there_s: thereS, line_bytes: lineBytes, joules } = frame.given;
  const words = [`${brief.format(tokens)} tokens`, span(thereS), scaled(lineBytes, "B")];
  if (joules) words.push(energy(joules));
  const receipts = drawn ? ` The last stage has signed for ${brief.format(Math.min(signed, drawn))} of the ${brief.format(drawn)} tokens that sources claim.` : "";
  write(byId("given-key"), `Together, as each says itself: ${words.join(", ")}.${receipts}`);
}

function choose(id) {
  chosen = chosen === id ? null : id;
  draw();
}

// What happened.

function drawChanges() {
  const list = byId("changes");
  const make = () => {
    const item = document.createElement("li");
    item.append(document.createElement("time"), document.createElement("b"), document.createElement("span"));
    return item;
  };
  const changes = [...frame.changes].reverse();
  sync(list, changes, (each) => `${each.at} ${each.name} ${each.text}`, make, (item, each) => {
    const [at, name, words] = item.children;
    write(at, clock(each.at));
    write(name, each.name);
    write(words, ` ${each.text}`);
  });
}

// Playing a recording.

const KEYS = {
  ArrowRight: "forward", ArrowLeft: "back", ArrowUp: "faster", ArrowDown: "slower", Home: "begin", End: "end", " ": "pause",
};

function press(key) {
  fetch("key", { method: "POST", body: String(key) }).catch(() => {});
}

function drawPlayback() {
  const played = frame.playback;
  byId("playback").hidden = played === null;
  if (played === null) return;
  const position = byId("position");
  if (document.activeElement !== position || !position.held) position.value = played.at_s / Math.max(played.whole_s, 1e-9);
  set(position, { "aria-valuetext": `${span(played.at_s)} of ${span(played.whole_s)}` });
  write(byId("pause"), played.paused ? "▶" : "❚❚");
  write(byId("speed"), played.paused ? "paused" : played.at_end ? "at its end" : `× ${played.speed}`);
  write(byId("clock"), `${span(played.at_s)} of ${span(played.whole_s)}`);
}

function listenToKeys() {
  for (const button of byId("playback").querySelectorAll("button")) {
    button.addEventListener("click", () => press(button.dataset.key));
  }
  const position = byId("position");
  position.addEventListener("input", () => {
    position.held = true;
    press(position.value);
  });
  position.addEventListener("change", () => (position.held = false));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen !== null) choose(chosen);
    if (frame === null || frame.playback === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const isOurs = event.target === document.body || event.target.id === "position";
    if (!isOurs || !(event.key in KEYS)) return;
    event.preventDefault();
    press(KEYS[event.key]);
  });
}

// The stream.

function draw() {
  if (frame === null || document.hidden) return;
  drawSummary();
  drawMap();
  drawCurves();
  drawPeers();
  drawChanges();
  drawPlayback();
}

function say(state, words) {
  byId("connection").dataset.state = state;
  write(byId("connection"), words);
}

function connect() {
  const stream = new EventSource("events");
  stream.onmessage = (message) => {
    frame = JSON.parse(message.data);
    say("live", frame.playback !== null ? "recording" : frame.virtual ? "simulation" : "live");
    draw();
  };
  stream.onerror = () => {
    say("lost", "no connection: what is shown is old");
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 2000); // the browser gives up after an answer of refusal
  };
}

makeHeadings();
listenToKeys();
document.addEventListener("visibilitychange", draw);
new ResizeObserver(draw).observe(document.body);
connect();
