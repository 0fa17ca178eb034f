"use strict";
// What the model saw, drawn on the media; and what it points at.
function cell(value) {
  if (typeof value === "number") return String(Math.round(value * 10) / 10);
  if (value === null || typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.length > 8 ? `${value.slice(0, 8).join(", ")}, \u2026 (${value.length})` : value.join(", ");
  return Object.entries(value).map(([key, inner]) => `${key} ${cell(inner)}`).join(" \u00b7 ");
}

const percent = (value, whole) => `${(100 * value) / whole}%`;

// "3000 × 1200, seen as 440 × 180 in 3 tiles", or the like of frames and seconds.
function sizes({ given, used }) {
  const side = (of) => (of.width && of.height ? `${of.width} \u00d7 ${of.height}` : "");
  const told = given.page ? [`page ${given.page} of ${given.pages}`] : [];
  if (side(given)) told.push(side(given));
  if (side(used)) told.push(`seen as ${side(used)}${used.tiles ? ` in ${used.tiles} tiles` : ""}`);
  if (used.frames) told.push(`${used.frames} frames`);
  if (used.seconds) told.push(`${cell(used.seconds)} s heard`);
  return told.join(", ");
}

// A picture with a layer for boxes; `item` is what was sent.
function view(item, receipt) {
  const picture = shown(item, true), layer = make("div", { class: "view" }, picture);
  if (item.kind === "document") return { layer: "", tools: [] };
  if (item.kind !== "image") return { layer: item.kind === "audio" ? picture : layer, tools: [] };
  const { given, used } = receipt, tools = [];
  if (Array.isArray(used.crop)) {
    const frame = make("div", { class: "crop", title: "The model sees what is inside." });
    layer.append(frame);
    whenLoaded(picture, () => Object.assign(frame.style, placed(used.crop.map(Number), picture)));
  }
  if (used.width && used.height && (used.crop || used.width < given.width || used.height < given.height)) tools.push(asSeen(picture, layer, used));
  return { layer, tools };
}

// A switch that shows the picture with the pixels that the model has.
function asSeen(picture, layer, used) {
  const crop = Array.isArray(used.crop) ? used.crop.map(Number) : null;
  let sheet = null;
  const button = make("button", { type: "button", class: "small", text: "As the model sees it", "aria-pressed": "false", onclick: () => {
    if (sheet) { sheet.remove(); sheet = null; }
    else {
      sheet = make("canvas", { width: Math.min(used.width, 4096), height: Math.min(used.height, 4096) });
      const pen = sheet.getContext("2d");
      pen.imageSmoothingQuality = "high";
      if (crop) {
        Object.assign(sheet.style, { inset: "auto", ...placed(crop, picture) });
        pen.drawImage(picture, crop[0], crop[1], crop[2] - crop[0], crop[3] - crop[1], 0, 0, sheet.width, sheet.height);
      } else pen.drawImage(picture, 0, 0, sheet.width, sheet.height);
      picture.after(sheet);
    }
    button.setAttribute("aria-pressed", String(Boolean(sheet)));
  } });
  return button;
}

function whenLoaded(picture, draw) {
  if (picture.complete) draw(); else picture.addEventListener("load", draw);
}

// Where a box in the pixels of a picture, as it stands upright, lies on it.
function placed([x1, y1, x2, y2], picture) {
  const { naturalWidth: width, naturalHeight: height } = picture;
  return { left: percent(x1, width), top: percent(y1, height), width: percent(x2 - x1, width), height: percent(y2 - y1, height) };
}

// Where in time the model looked: a mark for each frame, or the part that it heard.
function span({ given, used }) {
  const times = Array.isArray(used.timestamps_s) ? used.timestamps_s.map(Number) : [];
  const whole = Math.max(given.seconds || 0, ...times, used.seconds || 0);
  if (!whole || (!times.length && !used.seconds)) return [];
  const bar = make("div", { class: "span", role: "img", "aria-label": times.length ? `${times.length} frames over ${cell(whole)} s` : `${cell(used.seconds)} of ${cell(whole)} s` });
  if (times.length) bar.append(...times.slice(0, 512).map((time) => make("span", { class: "frame", place: { left: percent(time, whole) } })));
  else bar.append(make("span", { class: "heard", place: { width: percent(used.seconds, whole) } }));
  return [bar];
}

function facts(receipt) {
  const rows = [["given", cell(receipt.given)], ["seen", cell(receipt.used)], ["time", `${cell(receipt.milliseconds)} ms`]];
  return make("details", {}, make("summary", { text: "all facts" }),
    make("table", {}, ...rows.map(([head, text]) => make("tr", {}, make("th", { text: head }), make("td", { text })))));
}

// The receipt of an item; without the item (it is unknown which it was), without its picture.
function drawn(receipt, item) {
  const { layer, tools } = item ? view(item, receipt) : { layer: "", tools: [] };
  const tokens = `${receipt.tokens} tokens${receipt.cached ? ", from the cache" : ""}`;
  const caption = make("figcaption", {}, make("strong", { text: receipt.item }), [sizes(receipt), tokens].filter(Boolean).join(" \u00b7 "), ...tools);
  const figure = make("figure", { class: "receipt" }, layer, ...span(receipt), caption);
  if (receipt.lost.length) figure.append(make("ul", { class: "losses" }, ...receipt.lost.map((text) => make("li", { class: "loss", text }))));
  figure.append(facts(receipt));
  return figure;
}

// The places of `grounding` on a picture, which a browser shows upright: boxes [x1, y1, x2, y2] and points [x, y], with
// their labels. Of a polygon, its box is drawn.
function point(layer, picture, entries) {
  const draw = () => {
    layer.querySelectorAll(".box, .point").forEach((node) => node.remove());
    const { naturalWidth: width, naturalHeight: height } = picture, tints = new Map();
    const add = (label, kind, x, y, place) => {
      if (!tints.has(label)) tints.set(label, tints.size % 6);
      const aside = x > 0.6 * width ? " leftwards" : "", inside = kind === "box" && y < 0.08 * height ? " inside" : "";
      const name = label ? [make("span", { class: `label${aside}${inside}`, text: label })] : [];
      layer.append(make("div", { class: `${kind} tint${tints.get(label)}`, place }, ...name));
    };
    for (const entry of entries) {
      const box = entry.upright_box || entry.box, points = box ? [] : entry.upright_points || entry.points || [];
      if (box) add(entry.label, "box", box[0], box[1], placed(box, picture));
      for (const [x, y] of points) add(entry.label, "point", x, y, { left: percent(x, width), top: percent(y, height) });
    }
  };
  whenLoaded(picture, draw);
}
