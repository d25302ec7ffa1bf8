// The page of `gpt-lightning play`: asks this machine for texts, and shows tokens as they come.

const byId = (id) => document.getElementById(id);
const token = location.search; // ?token=..., which each request needs
const numbers = ["temperature", "top_p", "min_p", "max_new_tokens", "seed"];
const sections = [...document.querySelectorAll("section")];
let running = null; // AbortController of the texts that are being written

function say(line, isError = false) {
  byId("status").textContent = line;
  byId("status").classList.toggle("error", isError);
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

// ---- settings ----------------------------------------------------------------------------------

function setMode(compares) {
  byId("one").setAttribute("aria-pressed", String(!compares));
  byId("two").setAttribute("aria-pressed", String(compares));
  sections[1].hidden = !compares;
}

async function listCheckpoints() {
  const answer = await fetch("/checkpoints" + token);
  if (!answer.ok) throw new Error(await answer.text());
  const names = await answer.json();
  for (const section of sections) {
    section.querySelector("select").replaceChildren(...names.map((name) => new Option(name)));
  }
  // the first name is the best checkpoint; the second text shows the earliest one
  sections[1].querySelector("select").selectedIndex = Math.min(1, names.length - 1);
  byId("two").disabled = names.length < 2;
  if (names.length < 2) byId("two").title = "This source has one checkpoint";
}

// ---- a text ------------------------------------------------------------------------------------

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}

async function write(section, asked, signal) {
  const text = section.querySelector(".text");
  text.replaceChildren();
  const body = JSON.stringify({ ...asked, checkpoint: section.querySelector("select").value });
  const answer = await fetch("/generate" + token, { method: "POST", body, signal });
  if (!answer.ok) throw new Error(await answer.text());
  let ended = false;
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error);
    if (event.waiting) {
      if (!text.textContent) say("waiting for another text");
      continue;
    }
    say("writing");
    if ("beginning" in event) text.append(element("span", event.beginning, "prompt"));
    else if ("end" in event) ended = Boolean(text.append(event.end)) || true;
    else addToken(text, event);
  }
  if (!ended) throw new Error("the server has ended: start gpt-lightning play again");
}

function addToken(text, event) {
  const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
  const span = element("span", event.text, "token");
  span.style.backgroundColor = `hsl(${120 * event.p} 75% 50% / 35%)`;
  span.facts = event;
  text.append(span);
  if (atEnd) text.scrollTop = text.scrollHeight;
}

async function start() {
  stop();
  const controller = new AbortController();
  running = controller;
  byId("stop").disabled = false;
  const asked = { prompt: byId("prompt").value };
  for (const name of numbers) asked[name] = Number(byId(name).value);
  const shown = sections.filter((section) => !section.hidden);
  try {
    say("writing");
    for (const section of shown) section.querySelector(".text").replaceChildren();
    await Promise.all(shown.map((section) => write(section, asked, controller.signal)));
    if (running === controller) say("done");
  } catch (error) {
    if (running === controller) say(error.message, true);
    controller.abort();
  }
  if (running === controller) {
    running = null;
    byId("stop").disabled = true;
  }
}

function stop() {
  if (!running) return;
  const controller = running;
  running = null;
  controller.abort();
  byId("stop").disabled = true;
  say("stopped");
}

// ---- the likeliest tokens ----------------------------------------------------------------------

function choose(span) {
  if (!span?.facts) return;
  document.querySelector(".chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  const { text, p, likeliest } = span.facts;
  const rows = likeliest.map(([name, probability]) => row(name, probability, name === text));
  if (!likeliest.some(([name]) => name === text)) rows.push(row(text, p, true));
  document.querySelector("tbody").replaceChildren(...rows);
  document.querySelector("table").hidden = false;
}

function row(name, probability, drawn) {
  const made = element("tr", "", drawn ? "drawn" : "");
  const meter = element("meter", "");
  meter.value = probability;
  const cell = element("td", "");
  cell.append(meter);
  const percent = `${(100 * probability).toFixed(1)} %`;
  made.append(element("td", JSON.stringify(name)), element("td", percent), cell);
  return made;
}

function move(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const spans = [...event.currentTarget.querySelectorAll(".token")];
  if (!step || !spans.length) return;
  event.preventDefault();
  const at = spans.findIndex((span) => span.classList.contains("chosen"));
  const next = spans[Math.max(0, Math.min(spans.length - 1, at + step))];
  choose(next);
  next.scrollIntoView({ block: "nearest" });
}

for (const name of numbers) {
  const input = byId(name), output = input.parentElement.querySelector("output");
  input.addEventListener("input", () => { output.textContent = input.value; });
  input.dispatchEvent(new Event("input"));
}
for (const section of sections) {
  const text = section.querySelector(".text");
  text.addEventListener("pointerover", (event) => choose(event.target));
  text.addEventListener("click", (event) => choose(event.target));
  text.addEventListener("keydown", move);
  text.addEventListener("focus", () => choose(text.querySelector(".chosen, .token")));
}
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
});
byId("again").addEventListener("click", () => {
  byId("seed").value = (Number(byId("seed").value) + 1) % 10000;
  byId("seed").dispatchEvent(new Event("input"));
  start();
});
byId("stop").addEventListener("click", stop);
for (const id of ["one", "two"]) byId(id).addEventListener("click", () => setMode(id === "two"));
listCheckpoints().catch((error) => say(error.message, true));
