"use strict";
// Shows the stream of /omni/fleet. All text goes into text nodes, so that it is never markup.
const base = location.pathname.replace(/\/+$/, "");
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const HISTORY = 120;
const EVENTS = 200;
// Milliseconds without data after which the connection counts as broken.
const SILENT_MS = 15000;
let key = "";
const keys = new EventTarget();
const NEW_KEY = new Error("another key");
let seen = 0;
let eventLog = "";
const history = [];
const replicas = new Map();

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function draw(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const number = (value) => (value == null ? "-" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }));
const percent = (value) => (value == null ? "-" : `${Math.round(value * 100)} %`);

function age(seconds) {
  if (seconds == null) return "-";
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  return fetch(base + path, { ...options, headers, cache: "no-store" });
}

async function errorOf(answer) {
  try {
    const body = await answer.json();
    return body.error?.message ?? body.detail ?? `HTTP ${answer.status}`;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Reads the stream of server-sent events, and reconnects when it ends or is silent. EventSource cannot send a key. A tab
// has one stream, because a browser opens at most six connections to a server, for all tabs together.
async function readStream(take) {
  let last = "";
  for (;;) {
    const stop = new AbortController();
    let timer;
    const restartTimer = () => {
      clearTimeout(timer);
      timer = setTimeout(() => stop.abort(new Error("no data")), SILENT_MS);
    };
    // The head says for each stream whether its key is one for changes.
    keys.addEventListener("change", () => stop.abort(NEW_KEY), { once: true, signal: stop.signal });
    try {
      restartTimer();
      const headers = { Accept: "text/event-stream", ...(last && { "Last-Event-ID": last }) };
      const answer = await ask("/fleet", { headers, signal: stop.signal });
      if (answer.status === 401) {
        write(byId("link"), "A key is needed to look at this fleet.");
        await new Promise((resolve) => keys.addEventListener("change", resolve, { once: true }));
        continue;
      }
      if (!answer.ok) throw new Error(await errorOf(answer));
      document.body.classList.toggle("may-change", answer.headers.has("X-Omni-May-Change"));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        restartTimer();
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
          last = fields.id ?? last;
          if (fields.data) take(fields.event, JSON.parse(fields.data));
        }
      }
      throw new Error("the stream ended");
    } catch (error) {
      if (stop.signal.reason === NEW_KEY) continue;
      write(byId("link"), `No connection (${error.message}). Trying again.`);
      await sleep(1000);
    } finally {
      clearTimeout(timer);
      stop.abort();
    }
  }
}

function facts(list, entries) {
  entries.forEach(([name, text], place) => {
    const pair = list.children[place] ?? list.appendChild(make("div", "", make("dt", "", name), make("dd")));
    write(pair.lastChild, text);
  });
}

function confirmed(question, action) {
  const dialog = byId("confirm");
  write(byId("question"), question);
  write(byId("yes"), action);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    // The event comes some time after the dialog has closed: it may be that of the question before.
    dialog.onclose = () => {
      if (!dialog.open) resolve(dialog.returnValue === "yes");
    };
  });
}

async function change(question, action, path, method = "POST") {
  if (!(await confirmed(question, action))) return;
  write(byId("error"), "");
  try {
    const answer = await ask(path, { method });
    if (!answer.ok) write(byId("error"), await errorOf(answer));
  } catch (error) {
    write(byId("error"), error.message);
  }
}

function button(text, label, act) {
  const node = make("button", text === "Remove" ? "danger" : "", text);
  node.type = "button";
  node.setAttribute("aria-label", label);
  node.addEventListener("click", act);
  return node;
}

const HEAD_ACTIONS = [
  button("Drain", "Drain this head", () => change("Drain this head? It refuses new requests with 503, and finishes those it has.", "Drain this head", "/drain")),
  button("Resume", "Resume this head", () => change("Let this head take new requests again?", "Resume this head", "/resume")),
];

function newReplica(id) {
  const row = make("li", "replica");
  row.id = `replica-${id}`;
  const status = make("span", "status");
  const bars = make("div", "load");
  const meters = ["Requests", "Tokens", "KV memory"].map((name) => {
    const meter = make("meter");
    const text = make("span");
    meter.setAttribute("aria-label", `${name} of replica ${id}`);
    bars.append(make("span", "", name), meter, text);
    return { meter, text };
  });
  const details = make("dl");
  const path = `/replicas/${encodeURIComponent(id)}`;
  const actions = make(
    "div",
    "actions",
    button("Drain", `Drain replica ${id}`, () => change(`Drain replica ${id}? It gets no new requests, and finishes those it has.`, `Drain ${id}`, `${path}/drain`)),
    button("Resume", `Resume replica ${id}`, () => change(`Give replica ${id} new requests again?`, `Resume ${id}`, `${path}/resume`)),
    button("Remove", `Remove replica ${id}`, () => change(`Remove replica ${id}? Its requests move to others, its engine ends, and it does not come back by itself.`, `Remove ${id}`, path, "DELETE")),
  );
  row.append(make("h4", "", make("span", "", id), status), bars, details, actions);
  return { row, status, meters, details };
}

function showMeter({ meter, text }, value, most, words) {
  meter.max = most || 1;
  meter.value = value ?? 0;
  write(text, words);
}

function showReplica(shown, replica, mostRequests, mostTokens) {
  shown.row.className = `replica ${replica.status}`;
  const cordoned = replica.cordons.length ? `, cordoned: ${replica.cordons.join(", ")}` : "";
  write(shown.status, replica.status + (replica.other_generation ? `: ${replica.other_generation}` : cordoned));
  const [requests, tokens, kv] = shown.meters;
  showMeter(requests, replica.requests, mostRequests, `${number(replica.requests)}, ${number(replica.waiting)} wait`);
  showMeter(tokens, replica.tokens, replica.kv_tokens || mostTokens, number(replica.tokens));
  showMeter(kv, replica.kv_usage, 1, percent(replica.kv_usage));
  facts(shown.details, [
    ["Tokens/s", number(replica.tokens_per_second)],
    ["Cache hits", percent(replica.hit_rate)],
    ["Heartbeat", age(replica.heartbeat_seconds)],
    ["In this state", age(replica.since_seconds)],
    ["Restarts", number(replica.restarts)],
    ["Where", replica.remote ? replica.address : "this head"],
    ...(replica.machines?.length ? [["Machines", replica.machines.join(", ")]] : []),
  ]);
}

function showStages(stages) {
  const place = byId("stages");
  const present = new Set();
  stages.forEach((stage) => {
    const id = `stage-${stage.stage}`;
    let column = byId(id);
    if (!column) {
      column = place.appendChild(make("section", "stage", make("h3"), make("ul")));
      column.id = id;
    }
    const own = stage.replicas.filter((replica) => !replica.other_generation);
    const up = own.filter((replica) => replica.status === "up").length;
    const name = stage.name ? `Stage ${stage.stage}, ${stage.name}` : `Stage ${stage.stage}`;
    write(column.firstChild, `${name}: ${up} of ${own.length} up, policy ${stage.policy}`);
    const mostRequests = Math.max(...stage.replicas.map((replica) => replica.requests));
    const mostTokens = Math.max(...stage.replicas.map((replica) => replica.tokens));
    stage.replicas.forEach((replica, index) => {
      present.add(replica.id);
      if (!replicas.has(replica.id)) replicas.set(replica.id, newReplica(replica.id));
      const shown = replicas.get(replica.id);
      // Move a row only if necessary: a moved button loses the focus.
      const list = column.lastChild;
      if (list.children[index] !== shown.row) list.insertBefore(shown.row, list.children[index] ?? null);
      showReplica(shown, replica, mostRequests, mostTokens);
    });
  });
  for (const [id, shown] of replicas) {
    if (present.has(id)) continue;
    shown.row.remove();
    replicas.delete(id);
  }
}

function showGraph(stages) {
  const edges = stages.flatMap((stage) => stage.inputs.map((input) => [input, stage.stage]));
  const section = byId("graph-section");
  const words = edges.map(([from, to]) => `${stages[from].name} to ${stages[to].name}`).join(", ");
  section.hidden = stages.length < 2;
  if (section.hidden || section.dataset.words === words) return;
  section.dataset.words = words;
  const places = new Map();
  const filled = [];
  for (const stage of stages) {
    filled[stage.level] = (filled[stage.level] ?? 0) + 1;
    places.set(stage.stage, { x: 10 + stage.level * 200, y: 10 + (filled[stage.level] - 1) * 60 });
  }
  const lines = edges.map(([from, to]) => {
    const [a, b] = [places.get(from), places.get(to)];
    return draw("line", { x1: a.x + 140, y1: a.y + 20, x2: b.x, y2: b.y + 20, "marker-end": "url(#arrow)" });
  });
  const boxes = stages.map((stage) => {
    const { x, y } = places.get(stage.stage);
    const text = stage.output ? `${stage.name} (${stage.output})` : stage.name;
    return draw("g", {}, draw("rect", { x, y, width: 140, height: 40, rx: 5 }), draw("text", { x: x + 70, y: y + 25 }, text));
  });
  const arrow = draw("marker", { id: "arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto" }, draw("path", { d: "M0 0L10 5L0 10z", fill: "currentColor" }));
  const size = { width: filled.length * 200, height: Math.max(...filled) * 60 + 10 };
  byId("graph").replaceChildren(draw("svg", { ...size, role: "img", "aria-label": `Stages: ${words}` }, draw("defs", {}, arrow), ...lines, ...boxes));
}

const SPARKS = [
  ["Unfinished requests", (sample) => sample.unfinished, number],
  ["Waiting for a replica", (sample) => sample.held, number],
  ["Tokens per second", (sample) => sample.tokens_per_second, number],
  ["KV memory, fullest replica", (sample) => sample.kv_usage, percent],
];

function showHistory() {
  const place = byId("history");
  SPARKS.forEach(([name, value, format], index) => {
    let figure = place.children[index];
    if (!figure) {
      const line = draw("polyline", {});
      const picture = draw("svg", { class: "spark", viewBox: "0 0 119 100", preserveAspectRatio: "none", role: "img" }, line);
      figure = place.appendChild(make("figure", "", make("figcaption", "", make("span", "", name), make("span")), picture));
    }
    const values = history.map(value);
    const most = Math.max(...values, 1e-9);
    const words = values.length ? `${format(values.at(-1))} now, ${format(Math.max(...values))} at most` : "nothing yet";
    write(figure.firstChild.lastChild, words);
    figure.lastChild.setAttribute("aria-label", `${name}: ${words}`);
    const points = values.map((each, at) => `${HISTORY - values.length + at},${98 - (each / most) * 94}`);
    figure.querySelector("polyline").setAttribute("points", points.join(" "));
  });
}

function addSamples(samples) {
  history.push(...samples);
  history.splice(0, history.length - HISTORY);
  showHistory();
}

function showState(state) {
  seen = Date.now();
  write(byId("link"), "Live");
  const { head, requests } = state;
  const coordinator = head.coordinator == null ? "none needed" : head.coordinator ? "connected" : "away";
  facts(byId("head"), [
    ["State", head.state],
    // Remove the suffix that distinguishes processes of one host.
    ["Other heads", head.others.map((id) => id.replace(/-[0-9a-f]{32}$/, "")).join(", ") || "none"],
    ["Coordinator", coordinator],
    ["Name", head.name],
    ["vLLM", head.vllm],
    ["vllm-omni-plugin", head.plugin],
  ]);
  if (!byId("head-actions").children.length) byId("head-actions").append(...HEAD_ACTIONS);
  facts(byId("requests"), [
    ["Unfinished", number(requests.unfinished)],
    ["Queued", number(requests.queued)],
    ["Held before they were accepted", number(requests.held_http)],
    ["Held for a replica", number(requests.held_fleet)],
    ["Waiting to move", number(requests.held_move)],
    ["Waiting for a pause to end", number(requests.held_paused)],
    ["Moved so far", number(requests.moved)],
    ["Lost so far", number(requests.lost)],
    ["Refused so far", number(requests.refused)],
  ]);
  showGraph(state.stages);
  showStages(state.stages);
  if (state.sample) addSamples([state.sample]);
}

function showEvent(kind, event) {
  // Another process answers now and sends its events from the first one on.
  const log = event.id.split("-")[0];
  if (log !== eventLog) byId("events").replaceChildren();
  eventLog = log;
  const when = new Date(event.time * 1000);
  const time = make("time", "", when.toLocaleTimeString());
  time.dateTime = when.toISOString();
  const where = event.replica ?? (event.stage == null ? "head" : `stage ${event.stage}`);
  const more = event.requests ? `${event.requests} requests: ` : "";
  const list = byId("events");
  list.prepend(make("li", kind, time, make("b", "", kind), make("span", "", where), make("span", "", more + event.reason)));
  while (list.children.length > EVENTS) list.lastChild.remove();
}

byId("yes").addEventListener("click", () => byId("confirm").close("yes"));
byId("no").addEventListener("click", () => byId("confirm").close());
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  write(byId("error"), "");
  keys.dispatchEvent(new Event("change"));
});
setInterval(() => {
  if (seen && Date.now() - seen > 4000) write(byId("link"), "This head is silent. What is shown is old.");
}, 1000);
readStream((kind, data) => {
  if (kind === "history") {
    history.length = 0;
    addSamples(data);
  } else if (kind === "state") {
    showState(data);
  } else {
    showEvent(kind, data);
  }
});
