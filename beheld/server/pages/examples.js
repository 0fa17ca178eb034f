"use strict";
// Examples to click. Their pictures are drawn here, so that they need no network and no files.
const COLOURS = { red: "#d62828", blue: "#1d5fd0", green: "#2a9d3f", yellow: "#f2c12e", white: "#ffffff" };

function canvas(draw, width = 320, height = 240) {
  const sheet = make("canvas", { width, height }), pen = sheet.getContext("2d");
  pen.fillStyle = COLOURS.white;
  pen.fillRect(0, 0, width, height);
  draw(pen);
  return sheet;
}

function polygon(pen, colour, points) {
  pen.fillStyle = COLOURS[colour];
  pen.beginPath();
  points.forEach(([x, y]) => pen.lineTo(x, y));
  pen.fill();
}

function circle(pen, colour, x, y, radius) {
  pen.fillStyle = COLOURS[colour];
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

function star(pen, colour, x, y, radius) {
  polygon(pen, colour, Array.from({ length: 10 }, (_, k) => {
    const angle = (k * Math.PI) / 5 - Math.PI / 2, far = k % 2 ? radius * 0.42 : radius;
    return [x + far * Math.cos(angle), y + far * Math.sin(angle)];
  }));
}

function square(pen, colour, x, y, side) {
  polygon(pen, colour, [[x, y], [x + side, y], [x + side, y + side], [x, y + side]]);
}

const SCENE = (pen) => { circle(pen, "red", 90, 120, 48); square(pen, "blue", 190, 50, 76); star(pen, "yellow", 235, 190, 38); };
const PRINTED = (pen) => {
  pen.fillStyle = "#1c1b19";
  pen.font = "bold 58px sans-serif";
  pen.textAlign = "center";
  pen.fillText("HELLO", 160, 142);
};
const FRAMES = 16;
// A ball that goes from left to right.
const MOVING = (pen, frame) => circle(pen, "green", 50 + (220 * frame) / (FRAMES - 1), 120, 40);

async function pictureOf(draw, name) {
  const blob = await new Promise((resolve) => canvas(draw).toBlob(resolve, "image/png"));
  return new File([blob], name, { type: "image/png" });
}

// A canvas, filmed while it is drawn.
async function film(draw, name) {
  const sheet = canvas((pen) => draw(pen, 0)), pen = sheet.getContext("2d"), pieces = [];
  const camera = new MediaRecorder(sheet.captureStream());
  camera.ondataavailable = (event) => pieces.push(event.data);
  const over = new Promise((resolve) => { camera.onstop = resolve; });
  camera.start();
  for (let frame = 0; frame < FRAMES; frame++) {
    pen.fillStyle = COLOURS.white;
    pen.fillRect(0, 0, sheet.width, sheet.height);
    draw(pen, frame);
    await new Promise((resolve) => { setTimeout(resolve, 100); });
  }
  camera.stop();
  await over;
  const type = camera.mimeType.split(";")[0];
  return new File(pieces, `${name}.${type.split("/")[1]}`, { type });
}

// Three notes, each half a second, that rise.
function notes(name) {
  const rate = 16000, samples = Float32Array.from({ length: 1.5 * rate }, (_, k) => {
    const note = Math.floor((2 * k) / rate), within = (k % (rate / 2)) / (rate / 2);
    return 0.5 * Math.sin((2 * Math.PI * [440, 554.4, 659.3][note] * k) / rate) * Math.sin(Math.PI * within);
  });
  return new File([wav(samples, rate)], name, { type: "audio/wav" });
}

const EXAMPLES = [
  { kind: "image", question: "What is in this picture?", sheets: [SCENE], files: () => [pictureOf(SCENE, "shapes.png")] },
  { kind: "image", question: "What does it say?", sheets: [PRINTED], files: () => [pictureOf(PRINTED, "printed.png")] },
  {
    kind: "image", num: 2, question: "Which picture shows a star?",
    sheets: [(pen) => circle(pen, "blue", 160, 120, 70), (pen) => star(pen, "red", 160, 120, 90)],
    files() { return this.sheets.map((sheet, k) => pictureOf(sheet, `picture-${k + 1}.png`)); },
  },
  {
    kind: "video", question: "What happens in this video?", sheets: [0, 8, 15].map((frame) => (pen) => MOVING(pen, frame)),
    files: () => [film(MOVING, "moving")],
  },
  { kind: "audio", question: "What do you hear?", sheets: [], files: () => [notes("notes.wav")] },
];

// The examples that a model can take, as buttons; a click calls `use` with the files and the question.
function offer(modalities, use) {
  const fit = EXAMPLES.filter(({ kind }) => modalities.includes(kind) && (kind !== "video" || window.MediaRecorder));
  find("examples").replaceChildren(...fit.map((example) => {
    const thumb = make("span", { class: "thumb", "aria-hidden": "true" }, ...example.sheets.map((draw) => canvas(draw)));
    if (!example.sheets.length) thumb.textContent = "\u266a \u266b \u266a";
    const button = make("button", { type: "button", class: "example", onclick: async () => {
      button.disabled = true;
      try { use(await Promise.all(example.files()), example.question); } finally { button.disabled = false; }
    } }, thumb, example.question);
    return button;
  }));
}
