"use strict";
// Media that wait for a question: files that are chosen, dropped, pasted, drawn or recorded.
// An item: { kind, label, view: a blob's URL, url: a promise of its data URL }.
let waiting = [];
// Data URL -> the item's name, for the request as code.
const labels = new Map();

function kindOf(file) {
  if (file.type === "application/pdf") return "document";
  const kind = file.type.split("/")[0];
  return ["image", "video", "audio"].includes(kind) ? kind : null;
}

// A small picture of an item; a video's plays on a click. With `large`, it has controls.
function shown(item, large = false) {
  if (item.kind === "image") return make("img", { src: item.view, alt: item.label, title: item.label });
  if (item.kind === "video") {
    const film = make("video", { src: item.view, playsinline: "", "aria-label": item.label, title: item.label });
    film.muted = true;
    film.controls = large;
    if (!large) film.addEventListener("click", () => (film.paused ? film.play() : film.pause()));
    return film;
  }
  if (item.kind === "document") return make("span", { class: "sound" }, item.label);
  return make("span", { class: "sound" }, item.label, make("audio", { src: item.view, controls: "", "aria-label": item.label }));
}

// The part of a message that sends an item.
async function partOf({ kind, label, url }) {
  if (kind === "document") return { type: "file", file: { filename: label, file_data: await url } };
  return { type: `${kind}_url`, [`${kind}_url`]: { url: await url } };
}

// The item that each receipt tells of: they come in the order of items, and of a PDF each page has one.
function owners(receipts, items) {
  const left = new Map(), current = new Map();
  return receipts.map(({ modality, given }) => {
    if (!left.has(modality)) left.set(modality, items.filter(({ kind }) => kind === modality || (modality === "image" && kind === "document")));
    const last = current.get(modality);
    if (last?.pages > 1) { last.pages -= 1; return last.item; }
    const item = left.get(modality).shift();
    current.set(modality, { item, pages: item?.kind === "document" ? given.pages : 1 });
    return item;
  });
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// A file is shown at once; a question that comes before it was read waits for it.
function add(files) {
  find("left").replaceChildren();
  for (const file of files) {
    const kind = kindOf(file);
    if (!kind) { warn(`${file.name} is neither a picture nor a PDF nor a video nor a sound.`); continue; }
    const item = { kind, label: file.name || kind, view: URL.createObjectURL(file), url: read(file) };
    item.url.then((url) => labels.set(url, item.label), () => {
      warn(`${item.label} cannot be read.`);
      waiting = waiting.filter((other) => other !== item);
      list();
    });
    waiting.push(item);
  }
  list();
}

function list() {
  find("added").replaceChildren(...waiting.map((item, place) => make("li", {}, shown(item), make("button", {
    type: "button", text: "\u00d7", "aria-label": `Remove ${item.label}`,
    onclick: () => { waiting.splice(place, 1); list(); find("question").focus(); },
  }))));
}

// What was left out stands above the question until other files come, and then with the question that went without it.
function warn(text) { find("left").append(make("li", { class: "error", text })); }

// ---------------------------------------------------------------- recording

// Samples from -1 to 1 as a WAV file with one channel of 16 bits.
function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const word = (at, text) => { for (let k = 0; k < text.length; k++) view.setUint8(at + k, text.charCodeAt(k)); };
  word(0, "RIFF"); view.setUint32(4, 36 + 2 * samples.length, true); word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  word(36, "data"); view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, k) => view.setInt16(44 + 2 * k, 32767 * Math.max(-1, Math.min(1, value)), true));
  return view.buffer;
}

// Browsers record in formats of their own; a WAV file at 16 kHz is what every model and every player reads.
async function plain(blob) {
  const rate = 16000, context = new OfflineAudioContext(1, 1, rate);
  const sound = await context.decodeAudioData(await blob.arrayBuffer());
  const mixed = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel++) {
    sound.getChannelData(channel).forEach((value, k) => { mixed[k] += value / sound.numberOfChannels; });
  }
  return wav(mixed, rate);
}

let recorder = null, numRecorded = 0;

async function record() {
  if (recorder) { recorder.stop(); return; }
  find("left").replaceChildren();
  if (!navigator.mediaDevices) { warn("Browsers record only on pages over TLS, or from this machine."); return; }
  let stream;
  try { stream = await navigator.mediaDevices.getUserMedia({ audio: true }); }
  catch (error) { warn(`The microphone cannot be used: ${error.message}.`); return; }
  const pieces = [];
  recorder = new MediaRecorder(stream);
  recorder.ondataavailable = (event) => pieces.push(event.data);
  recorder.onstop = async () => {
    stream.getTracks().forEach((track) => track.stop());
    recorder = null;
    mark();
    try { add([new File([await plain(new Blob(pieces))], `recording-${++numRecorded}.wav`, { type: "audio/wav" })]); }
    catch { warn("The recording is empty."); }
    find("question").focus();
  };
  recorder.start();
  mark();
}

function mark() {
  find("record").setAttribute("aria-pressed", String(Boolean(recorder)));
  find("record").textContent = recorder ? "End recording" : "Record";
}

find("record").addEventListener("click", record);
