"use strict";
// The request as code to copy, in three languages. Media are read from files, which have the names of those sent.
const DATA = /^data:([\w.+/-]+);base64,/;
// Fields of a request that OpenAI's client has no parameters for.
const EXTRA = ["grounding", "add_generation_prompt", "continue_final_message"];

function fileOf(url) {
  const kind = DATA.exec(url);
  return kind ? { name: labels.get(url) || "file", kind: kind[1] } : null;
}

// A JSON value in a language that spells true, false, null and texts its own way.
function spelt(value, spell, indent) {
  const more = `${indent}${spell.step}`;
  if (typeof value === "string") return spell.text(value);
  if (value === null || typeof value !== "object") return spell.words[String(value)] || String(value);
  const list = Array.isArray(value), [open, end] = list ? "[]" : "{}";
  const inner = list ? value.map((one) => spelt(one, spell, more)) : Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${spelt(one, spell, more)}`);
  if (!inner.length) return open + end;
  const line = `${open}${inner.join(", ")}${end}`;
  if (line.length + indent.length < 88 && !line.includes("\n")) return line;
  return `${open}\n${inner.map((one) => more + one).join(",\n")}${spell.trailing}\n${indent}${end}`;
}

function python(body, server) {
  const text = (value) => {
    const file = fileOf(value);
    return file ? `data_url(${JSON.stringify(file.name)}, ${JSON.stringify(file.kind)})` : JSON.stringify(value);
  };
  const spell = { step: "    ", trailing: ",", words: { true: "True", false: "False", null: "None" }, text };
  const own = Object.entries(body).filter(([key]) => !EXTRA.includes(key) && !key.startsWith("stream"));
  const extra = Object.fromEntries(Object.entries(body).filter(([key]) => EXTRA.includes(key)));
  const lines = own.map(([key, value]) => `    ${key}=${spelt(value, spell, "    ")},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${spelt(extra, spell, "    ")},`);
  const reads = JSON.stringify(body.messages).includes(";base64,");
  const helper = `def data_url(path, kind):
    with open(path, "rb") as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"


`;
  return `${reads ? "import base64\n\n" : ""}from openai import OpenAI

${reads ? `\n${helper}` : ""}client = OpenAI(base_url=${JSON.stringify(`${server}v1`)}, api_key="none")
answer = client.chat.completions.create(
${lines.join("\n")}
)
print(answer.choices[0].message.content)
`;
}

// The shell reads what stands between the two JSONs, and puts the files in.
function curl(body, server) {
  const kept = (text) => text.replace(/[\\$`]/g, "\\$&");
  const text = (value) => {
    const file = fileOf(value);
    return file
      ? `"data:${file.kind};base64,$(base64 < '${file.name.replaceAll("'", "'\\''")}' | tr -d '\\n')"`
      : kept(JSON.stringify(value));
  };
  const spell = { step: "  ", trailing: "", words: {}, text };
  return `curl ${server}v1/chat/completions \\
  -H "Authorization: Bearer none" \\
  -H "Content-Type: application/json" \\
  --data-binary @- <<JSON
${spelt(whole(body), spell, "")}
JSON
`;
}

function javascript(body, server) {
  const text = (value) => {
    const file = fileOf(value);
    return file ? `await dataUrl(${JSON.stringify(file.name)}, ${JSON.stringify(file.kind)})` : JSON.stringify(value);
  };
  const spell = { step: "  ", trailing: ",", words: {}, text };
  const reads = JSON.stringify(body.messages).includes(";base64,");
  const helper = `import { readFile } from "node:fs/promises";

const dataUrl = async (path, kind) => \`data:\${kind};base64,\${await readFile(path, "base64")}\`;
`;
  return `${reads ? helper : ""}const response = await fetch(${JSON.stringify(`${server}v1/chat/completions`)}, {
  method: "POST",
  headers: { "Authorization": "Bearer none", "Content-Type": "application/json" },
  body: JSON.stringify(${spelt(whole(body), spell, "  ")}),
});
const answer = await response.json();
console.log(answer.choices[0].message.content);
`;
}

// Code that is read at a glance gets the answer in one piece.
function whole(body) {
  return Object.fromEntries(Object.entries(body).filter(([key]) => !key.startsWith("stream")));
}

const LANGUAGES = {
  python: [python, "Needs the package openai: pip install openai."],
  curl: [curl, "For a POSIX shell."],
  javascript: [javascript, "For Node.js, as a file whose name ends with .mjs."],
};
let asked = null;

function showCode(body, language = "python") {
  asked = body;
  const [write, note] = LANGUAGES[language];
  find("text").textContent = write(body, new URL("./", location.href).href);
  find("note").textContent = `${note} The files are read from the folder it runs in. If the server has a key, put it in place of none.`;
  for (const button of find("code").querySelectorAll("[data-language]")) {
    button.setAttribute("aria-pressed", String(button.dataset.language === language));
  }
  find("copy").textContent = "Copy";
  if (!find("code").open) find("code").showModal();
}

async function copyCode() {
  try {
    await navigator.clipboard.writeText(find("text").textContent);
    find("copy").textContent = "Copied";
  } catch {
    // A page from another machine without TLS may not write the clipboard: the text is selected for the user's own keys.
    getSelection().selectAllChildren(find("text"));
    find("copy").textContent = "Selected";
  }
}

find("code").addEventListener("click", (event) => {
  const { language } = event.target.dataset;
  if (language) showCode(asked, language);
  else if (event.target === find("code")) find("code").close();
});
find("copy").addEventListener("click", copyCode);
find("close").addEventListener("click", () => find("code").close());
