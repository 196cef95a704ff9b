// The page shows what the gateway has rendered: regions of HTML come by one stream and are laid over what is there, so
// that focus, open parts and scroll positions stay. Everything that people typed goes in as text, never as HTML.

const $ = (selector, root = document) => root.querySelector(selector);
const KEY = "llama-gateway-key";
const needsKey = document.body.dataset.keys === "yes";

function auth() {
  const key = needsKey ? sessionStorage.getItem(KEY) : null;
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function fault(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered ${response.status}.`;
  }
}

// --- laying new HTML over old ---------------------------------------------------------------------------------------

function lay(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) return from.replaceWith(to);
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return undefined;
  }
  if (from.nodeName === "TIME" && from.dataset.at === to.dataset.at) return undefined;
  for (const { name } of [...from.attributes]) {
    if (!to.hasAttribute(name) && !(name === "open" && from.nodeName === "DETAILS")) from.removeAttribute(name);
  }
  for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  if (!from.hasAttribute("data-own")) layChildren(from, to);
  return undefined;
}

function layChildren(from, to) {
  const keyed = new Map([...from.children].filter((child) => child.dataset.key).map((child) => [child.dataset.key, child]));
  let place = from.firstChild;
  for (const next of [...to.childNodes]) {
    const same = next.dataset?.key ? keyed.get(next.dataset.key) : place;
    if (!same || (same.dataset?.key ?? "") !== (next.dataset?.key ?? "")) {
      from.insertBefore(next, place);
      continue;
    }
    if (same !== place) from.insertBefore(same, place);
    const after = same.nextSibling;
    lay(same, next);
    place = after;
  }
  while (place) {
    const after = place.nextSibling;
    place.remove();
    place = after;
  }
}

function show(element, html) {
  const parsed = new DOMParser().parseFromString(`<${element.tagName}>${html}</${element.tagName}>`, "text/html");
  layChildren(element, parsed.body.firstChild);
  for (const time of element.querySelectorAll("time")) tell(time);
}

// --- times ----------------------------------------------------------------------------------------------------------

let skew = 0;

function tell(time) {
  const at = Number(time.dataset.at);
  const text = time.dataset.form === "ago" ? ago(Date.now() / 1000 + skew - at) : new Date(at * 1000).toLocaleTimeString([], { hour12: false });
  if (time.textContent !== text) time.textContent = text;
}

function ago(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 5) return "just now";
  if (s < 60) return `${s} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min ago`;
  return `${Math.floor(s / 86400)} d ago`;
}

setInterval(() => document.querySelectorAll('time[data-form="ago"]').forEach(tell), 1000);

// --- the stream -----------------------------------------------------------------------------------------------------

const WORDS = { live: "Live", waiting: "Connecting" };
let patience = 1;
let watching = null;

function link(state, text) {
  const element = $("#link");
  element.dataset.link = state;
  const words = text ?? WORDS[state];
  if ($("span", element).textContent !== words) $("span", element).textContent = words;
}

async function watch() {
  watching?.abort();
  const own = (watching = new AbortController());
  link("waiting");
  try {
    const response = await fetch("ui/stream", { headers: auth(), signal: own.signal, cache: "no-store" });
    if (response.status === 401) return ask(sessionStorage.getItem(KEY) ? await fault(response) : "");
    if (!response.ok) throw new Error(await fault(response));
    welcome();
    await read(response.body, (data) => draw(JSON.parse(data)));
    throw new Error("The gateway has closed the connection.");
  } catch (error) {
    if (own.signal.aborted) return undefined;
    const seconds = patience;
    patience = Math.min(15, patience * 2);
    link("lost", `${error instanceof TypeError ? "The gateway does not answer." : error.message} Trying again in ${seconds} s`);
    setTimeout(() => own === watching && watch(), seconds * 1000);
  }
  return undefined;
}

async function read(body, onData) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data && !lines.includes("event: end")) onData(data);
    }
  }
}

function draw(frame) {
  patience = 1;
  link("live");
  for (const [name, html] of Object.entries(frame.regions)) {
    if (name.startsWith("model:")) drawModel(name.slice(6), html);
    else if (name === "memory") {
      $("#memory-card").hidden = false;
      show($("#memory"), html);
    } else show(document.getElementById(name), html);
  }
  order(frame.models);
}

function drawModel(id, html) {
  let card = models.get(id);
  if (!card) {
    card = document.createElement("article");
    card.className = "model";
    card.setAttribute("aria-label", id);
    models.set(id, card);
    $("#models").append(card);
  }
  const before = $(".state", card)?.textContent;
  show(card, html);
  const now = $(".state", card).textContent;
  if (before && before !== now) $("#announce").textContent = `${id}: ${now}. ${$(".why", card).firstChild.textContent}`;
}

const models = new Map();

function order(ids) {
  for (const id of [...models.keys()]) {
    if (ids.includes(id)) continue;
    models.get(id).remove();
    models.delete(id);
  }
  if (ids.join("\n") !== [...models.keys()].join("\n")) {
    for (const id of ids) {
      const card = models.get(id);
      models.delete(id);
      models.set(id, card);
      $("#models").append(card);
    }
  }
  const chatty = ids.filter((id) => $("h3", models.get(id)).dataset.kind === "chat");
  if (chatty.join("\n") === [...$("#chat-model").options].map((option) => option.value).join("\n")) return;
  const chosen = $("#chat-model").value;
  $("#chat-model").replaceChildren(...chatty.map((id) => new Option(id, id, false, id === chosen)));
}

// --- the key --------------------------------------------------------------------------------------------------------

function ask(error) {
  link("waiting", "A key is needed");
  sessionStorage.removeItem(KEY);
  $("#panel").hidden = $("#who").hidden = true;
  $("#door").hidden = false;
  $("#door-error").textContent = error;
  $("#key").focus();
}

function welcome() {
  $("#door").hidden = true;
  $("#panel").hidden = false;
  if (!needsKey) return;
  $("#who").hidden = false;
  budget();
}

$("#door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("#key").value.trim());
  $("#key").value = "";
  watch();
});

$("#leave").addEventListener("click", () => {
  watching?.abort();
  sessionStorage.removeItem(KEY);
  location.reload();
});

async function budget() {
  const response = await fetch("v1/usage", { headers: auth() });
  if (!response.ok) return;
  const { key, usage } = await response.json();
  $("#who span").textContent = key;
  const windows = Object.entries(usage);
  $("#usage-card").hidden = windows.length === 0;
  $("#usage tbody").replaceChildren(...windows.map(([name, { used, limit }]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = name.replaceAll("_", " ");
    const cells = [used, limit].map((value) => {
      const cell = document.createElement("td");
      cell.textContent = value === null ? "none" : Number(value).toLocaleString("en");
      return cell;
    });
    row.append(head, ...cells);
    return row;
  }));
}

setInterval(() => needsKey && !$("#panel").hidden && !document.hidden && budget(), 30000);

// --- load, unload, logs ---------------------------------------------------------------------------------------------

const path = (id) => id.split("/").map(encodeURIComponent).join("/");

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-act]");
  if (!button) return;
  button.disabled = true;
  const { act, model } = button.dataset;
  const response = await fetch(`admin/models/${path(model)}/${act}`, { method: "POST", headers: auth() }).catch(() => null);
  $("#announce").textContent = response?.ok ? `${model}: ${act} asked for.` : response ? await fault(response) : "The gateway does not answer.";
  setTimeout(() => (button.disabled = false), 1200);
});

document.addEventListener("toggle", (event) => event.target.dataset?.log && event.target.open && follow(event.target), true);

async function follow(details) {
  const pre = $("pre", details);
  while (details.open && details.isConnected) {
    if (!document.hidden) {
      const response = await fetch(`admin/models/${path(details.dataset.log)}/logs?lines=200`, { headers: auth() }).catch(() => null);
      if (response) {
        const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
        pre.textContent = response.ok ? (await response.json()).lines.join("\n") || "The engine has said nothing yet." : await fault(response);
        if (atEnd) pre.scrollTop = pre.scrollHeight;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// --- chat -----------------------------------------------------------------------------------------------------------

const messages = [];
let answering = null;

function say(role, text) {
  const element = document.createElement("div");
  element.className = `said said-${role}`;
  element.textContent = text;
  $("#talk").append(element);
  $("#talk").scrollTop = $("#talk").scrollHeight;
  return element;
}

function meter({ limit, prompt, answer, count, warning }) {
  const used = prompt + answer;
  const [left, right] = [$("#meter .prompt"), $("#meter .answer")];
  const width = (tokens) => Math.min(1000, (1000 * tokens) / Math.max(1, limit)).toFixed(1);
  left.setAttribute("width", width(prompt));
  right.setAttribute("x", width(prompt));
  right.setAttribute("width", width(answer));
  const about = count === "exact" ? "" : "at most ";
  const text = `Context: ${about}${used.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens${warning ? `, ${warning}` : ""}`;
  $("#meter-text").textContent = text;
  for (const [name, value] of [["max", limit], ["now", used], ["text", text]]) $("#meter").setAttribute(`aria-value${name}`, value);
}

async function send(text) {
  messages.push({ role: "user", content: text });
  say("user", text);
  const bubble = say("assistant", "");
  const own = (answering = new AbortController());
  working(true);
  let answer = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...auth() },
      body: JSON.stringify({ model: $("#chat-model").value, messages, stream: true, stream_options: { include_usage: true } }),
      signal: own.signal,
    });
    if (!response.ok) throw new Error(await fault(response));
    const header = (name) => response.headers.get(`x-context-${name}`);
    // A stream that began while the model was loading says in its usage what the head could not.
    const context = { limit: Number(header("limit") ?? 0), prompt: Number(header("prompt-tokens") ?? 0), count: header("count"), warning: header("warning"), answer: 0 };
    await read(response.body, (data) => {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      if (delta.content) {
        answer += delta.content;
        context.answer += 1;
        bubble.textContent = answer;
        $("#talk").scrollTop = $("#talk").scrollHeight;
      }
      if (chunk.usage) Object.assign(context, { prompt: chunk.usage.prompt_tokens, answer: chunk.usage.completion_tokens, count: "exact" });
      if (chunk.timings?.predicted_per_second) $("#meter-rate").textContent = `${chunk.timings.predicted_per_second.toFixed(0)} tokens/s`;
      if (context.limit) meter(context);
    });
    messages.push({ role: "assistant", content: answer });
  } catch (error) {
    if (own.signal.aborted && answer) messages.push({ role: "assistant", content: answer });
    else messages.pop();
    if (!own.signal.aborted) say("fault", error instanceof TypeError ? "The connection to the gateway broke off." : error.message);
    if (!answer) bubble.remove();
  } finally {
    if (own === answering) working(false);
  }
}

function working(is) {
  $("#talk").setAttribute("aria-busy", String(is));
  $("#chat-send").textContent = is ? "Stop" : "Send";
  if (!is) answering = null;
}

$("#chat").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  const text = $("#chat-text").value.trim();
  $("#chat-text").value = "";
  if (text) send(text);
  return undefined;
});

$("#chat-text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answering) $("#chat").requestSubmit();
});

$("#chat-new").addEventListener("click", () => {
  answering?.abort();
  messages.length = 0;
  $("#talk").replaceChildren();
  $("#meter-text").textContent = "Context: known with the first answer";
  $("#meter-rate").textContent = "";
  for (const bar of [$("#meter .prompt"), $("#meter .answer")]) bar.setAttribute("width", "0");
  $("#chat-text").focus();
});

// --- connect --------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll('[role="tab"]')];

function choose(tab) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  tab.focus();
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(tabs.at((place + step) % tabs.length));
  });
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      // Over plain http only this machine may write to the clipboard: then at least it is selected.
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

watch();
