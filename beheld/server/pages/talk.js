"use strict";
// The conversation: questions, answers as they grow, stop, continue.
const talk = find("talk"), question = find("question"), hint = find("hint"), kinds = find("kinds");
// `allMedia` are the items of all messages, in order: receipts count them by kind.
let name = null, advice = null, models = [], messages = [], allMedia = [], running = null, grounds = false;

function turn(mine) {
  hint.remove();
  const node = make("article", { class: mine ? "turn mine" : "turn answer", "aria-label": mine ? "You" : "Answer" });
  talk.append(node);
  return node;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer was cut off. Ask again.");
    held += value;
    const pieces = held.split("\n\n");
    held = pieces.pop();
    for (const piece of pieces) {
      const data = piece.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function refusal(response) {
  try { return (await response.json()).error.message; } catch { return `The server answered ${response.status}.`; }
}

// A browser's own words of a connection ("Failed to fetch") say less than is known.
function words(error) {
  if (error instanceof TypeError) return "The server cannot be reached, or has ended the connection. Ask again.";
  return error instanceof SyntaxError ? "What the server sent cannot be read." : error.message;
}

// An answer's nodes, and what is known of it.
function begun() {
  const node = turn(false), said = make("p", { class: "said" }), figures = make("p", { class: "figures", text: "\u2026" });
  const foot = make("div", { class: "foot" }, figures), receipts = make("div", { class: "receipts" });
  node.append(said, foot, receipts);
  return { node, said, receipts, thoughts: make("p", { class: "thoughts" }), figures, foot, whole: "", layers: new Map(), items: new Map() };
}

// The receipts of a request tell of all its media; pictures of earlier questions are not drawn again.
function showReceipts(answer, receipts, items, before) {
  const earlier = [], found = owners(receipts, items);
  for (const [place, receipt] of receipts.entries()) {
    const item = found[place];
    answer.items.set(receipt.item, item);
    if (item && items.indexOf(item) < before) { earlier.push(receipt); continue; }
    const figure = drawn(receipt, item), picture = figure.querySelector(".view img");
    if (picture) answer.layers.set(receipt.item, { layer: figure.querySelector(".view"), picture });
    answer.receipts.append(figure);
  }
  if (!earlier.length) return;
  const tokens = earlier.reduce((sum, { tokens: each }) => sum + each, 0);
  answer.receipts.append(make("p", { class: "figures", text: `media of earlier questions: ${earlier.map(({ item }) => item).join(", ")} \u00b7 ${tokens} tokens` }));
}

// The boxes of a picture of an earlier question need that picture. Entries name it as receipts do: "image 1".
function showBoxes(answer, entries) {
  const images = new Map([...answer.items].filter(([, item]) => item?.kind === "image"));
  for (const at of new Set(entries.map(({ image }) => image))) {
    if (!answer.layers.has(at) && images.has(at)) {
      const picture = shown(images.get(at)), layer = make("div", { class: "view" }, picture);
      answer.layers.set(at, { layer, picture });
      answer.receipts.append(make("figure", { class: "receipt" }, layer));
    }
    const found = answer.layers.get(at);
    found?.layer.closest(".receipt").classList.add("pointed");
    if (found) point(found.layer, found.picture, entries.filter(({ image }) => image === at));
  }
}

function request(conversation) {
  const body = { model: name, messages: conversation, stream: true, stream_options: { include_usage: true } };
  if (find("temperature").value !== "") body.temperature = Number(find("temperature").value);
  if (find("longest").value !== "") body.max_completion_tokens = Math.round(Number(find("longest").value));
  if (find("grounding").checked) body.grounding = true;
  return body;
}

// Send a request, and show its answer as it grows. `media` are what the receipts tell of, from `before` on for the first time.
async function stream(body, answer, controller, media, before) {
  const found = { begin: performance.now(), first: null, usage: null, reason: null };
  answer.found = found;
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: controller.signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.media && before !== null) showReceipts(answer, chunk.media, media, before);
    found.usage = chunk.usage || found.usage;
    for (const choice of chunk.choices) {
      const { content, reasoning_content: thought } = choice.delta, boxes = choice.grounding;
      if (thought) { if (!answer.thoughts.isConnected) answer.said.before(answer.thoughts); answer.thoughts.append(thought); }
      if (content) { answer.whole += content; answer.said.append(content); }
      if (Array.isArray(boxes)) showBoxes(answer, boxes);
      if ((content || thought) && found.first === null) found.first = performance.now();
      found.reason = choice.finish_reason || found.reason;
    }
    follow(answer.said);
  }
}

async function ask() {
  const text = question.value.trim(), items = waiting;
  if (running || (!text && !items.length)) return;
  // The embedded model knows what it does not know of one question's media, not of those of a conversation.
  if (advice && items.length && allMedia.length) {
    messages = []; allMedia = [];
    talk.append(make("p", { class: "figures", text: "A new conversation: this model knows the media of one question only." }));
  }
  // "New" puts another conversation and no controller in the place of these.
  const conversation = messages, media = allMedia, controller = new AbortController(), current = () => messages === conversation;
  document.querySelectorAll(".continue").forEach((node) => node.remove());
  const mine = turn(true);
  if (items.length) mine.append(make("ul", { class: "media" }, ...items.map((item) => make("li", {}, shown(item)))));
  if (text) mine.append(make("p", { class: "said", text }));
  if (find("left").children.length) mine.append(make("ul", { class: "left" }, ...find("left").children));
  const before = conversation.length, seen = media.length;
  waiting = []; list(); question.value = ""; fit();
  const answer = begun();
  mine.scrollIntoView({ block: "start" });
  busy(controller);
  try {
    const parts = [];
    for (const item of items) parts.push(await partOf(item));
    if (text) parts.push({ type: "text", text });
    controller.signal.throwIfAborted();
    conversation.push({ role: "user", content: parts });
    media.push(...items);
    answer.body = request([...conversation]);
    await stream(answer.body, answer, controller, media, seen);
    conversation.push({ role: "assistant", content: answer.whole });
    if (current()) say("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError" && conversation.length > before) {
      answer.found.reason = "stopped";
      conversation.push({ role: "assistant", content: answer.whole });
    } else {
      conversation.length = before;
      media.length = seen;
      if (error.name === "AbortError") answer.found = { reason: "stopped" };
      else answer.foot.after(make("p", { class: "error", role: "alert", text: words(error) }));
      if (current()) again(text, items);
    }
  }
  if (current()) ended(answer, conversation, media);
}

// Go on with an answer that was stopped, or cut at the limit of tokens: the model continues its own last message.
async function more(answer, conversation, media) {
  if (running) return;
  const controller = new AbortController(), current = () => messages === conversation;
  answer.foot.replaceChildren(answer.figures);
  answer.figures.textContent = "\u2026";
  busy(controller);
  answer.body = { ...request([...conversation]), add_generation_prompt: false, continue_final_message: true };
  try {
    await stream(answer.body, answer, controller, media, null);
  } catch (error) {
    if (error.name === "AbortError") answer.found.reason = "stopped";
    else answer.foot.after(make("p", { class: "error", role: "alert", text: words(error) }));
  }
  conversation[conversation.length - 1] = { role: "assistant", content: answer.whole };
  if (current()) ended(answer, conversation, media);
}

// What is known of an answer once it has ended, and what can be done with it.
function ended(answer, conversation, media) {
  const { begin, first, usage, reason } = answer.found || {}, told = [];
  if (usage) {
    const rate = usage.completion_tokens > 1 && first !== null ? (1000 * (usage.completion_tokens - 1)) / Math.max(1, performance.now() - first) : 0;
    told.push(`${usage.prompt_tokens} tokens in, ${usage.prompt_tokens_details.cached_tokens} of them cached`);
    told.push(`${usage.completion_tokens} out`);
    if (rate) told.push(`${rate.toFixed(1)} tokens/s`);
  }
  if (first) told.push(`first after ${Math.round(first - begin)} ms`);
  if (reason && reason !== "stop") told.push(reason === "length" ? "cut at the limit of tokens" : reason);
  answer.figures.textContent = told.join(" \u00b7 ");
  const kept = conversation[conversation.length - 1];
  if (["stopped", "length"].includes(reason) && answer.whole && kept?.content === answer.whole) {
    answer.foot.append(make("button", { type: "button", class: "small continue", text: "Continue", onclick: () => more(answer, conversation, media) }));
  }
  if (answer.body) {
    answer.foot.append(make("button", { type: "button", class: "small", text: "Code", onclick: () => showCode(answer.body) }));
  }
  if (advice && answer.whole === advice.answer) answer.foot.after(make("p", { class: "advice", text: advice.text }));
  if (!told.length) answer.foot.remove();
  busy(null);
  const error = answer.node.querySelector(".error");
  // What was refused stands in the box again, which takes room.
  if (error) error.scrollIntoView({ block: "nearest", behavior: "instant" });
  else follow(answer.foot);
  question.focus();
}

// Keep the end of a node in view, unless the reader has scrolled away from it; receipts below it may stay out of view.
function follow(node) {
  const below = node.getBoundingClientRect().bottom + 16 - talk.getBoundingClientRect().bottom;
  if (below > 0 && below < 240) talk.scrollBy({ top: below, behavior: "instant" });
}

// What was refused can be put right and asked again.
function again(text, items) {
  waiting = [...items, ...waiting];
  list();
  question.value = [text, question.value].filter(Boolean).join("\n");
  fit();
}

function busy(controller) {
  running = controller;
  find("stop").hidden = !controller;
  find("ask").disabled = Boolean(controller);
}

function fit() { question.style.height = "auto"; question.style.height = `${question.scrollHeight}px`; }

function fresh() {
  running?.abort();
  busy(null);
  messages = []; allMedia = [];
  talk.replaceChildren(hint);
  question.focus();
}

find("options").addEventListener("click", () => {
  find("options").setAttribute("aria-expanded", String(find("settings").classList.toggle("open")));
});
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !find("code").open) running?.abort(); });
find("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
find("stop").addEventListener("click", () => running?.abort());
find("files").addEventListener("change", (event) => { add([...event.target.files]); event.target.value = ""; });
find("fresh").addEventListener("click", fresh);
for (const type of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(type, (event) => {
    event.preventDefault();
    find("box").classList.toggle("over", type === "dragover");
    if (type === "drop") add([...event.dataTransfer.files]);
  });
}
document.addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); add(files); }
});

// Show what a model takes; what it cannot take is neither asked for nor offered.
function introduce(model) {
  name = model.id;
  advice = model.advice;
  offerBoxes();
  const takes = `takes ${["text", ...model.modalities].join(", ")} \u00b7 ${model.max_model_len} tokens`;
  find("about").textContent = models.length > 1 ? takes : `${name} \u00b7 ${takes}`;
  const known = { image: ["pictures", "a PDF"], video: ["a video"], audio: ["a sound"] };
  const taken = model.modalities.flatMap((kind) => known[kind] || []);
  const list = [taken.slice(0, -1).join(", "), ...taken.slice(-1)].filter(Boolean).join(" or ");
  kinds.textContent = list ? `Drop ${list} anywhere, or paste them, and ask about them.` : "Ask a question.";
  find("files").accept = model.modalities.filter((kind) => known[kind]).map((kind) => (kind === "image" ? "image/*,application/pdf" : `${kind}/*`)).join(",");
  find("record").hidden = !model.modalities.includes("audio");
  offer(model.modalities, (files, text) => {
    if (running) return;
    waiting = [];
    add(files);
    question.value = text;
    ask();
  });
}

// The embedded model says where things are in words alone.
function offerBoxes() {
  find("draw").hidden = !grounds || Boolean(advice);
  if (advice) find("grounding").checked = false;
}

function choose({ data }) {
  models = data;
  find("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, text: id })));
  find("model").hidden = data.length < 2;
  introduce(data[0]);
}

find("model").addEventListener("change", (event) => introduce(models.find(({ id }) => id === event.target.value)));
fetch("v1/models").then((response) => response.json()).then(choose).catch(() => {
  find("about").textContent = "the server does not answer";
});
// Servers that can say where things are have a field for it.
fetch("openapi.json").then((response) => response.json()).then((known) => {
  grounds = JSON.stringify(known.components.schemas.ChatRequest?.properties || {}).includes('"grounding"');
  offerBoxes();
}).catch(() => {});
