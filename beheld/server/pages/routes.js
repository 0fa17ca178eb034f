"use strict";
// Lists the routes of /openapi.json, which is next to this page whatever the server's root path is, and the fields of their bodies.
const state = document.getElementById("state");

function named(definitions, schema) {
  // The schema that a reference names.
  return schema && schema.$ref ? definitions[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const several = schema.anyOf || schema.oneOf;
  if (several) return [...new Set(several.map(typeOf))].filter((each) => each !== "null").join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items || {})}`;
  return schema.type || "any";
}

function shown(definitions, method, path, operation) {
  const made = document.getElementById("route").content.cloneNode(true);
  made.querySelector(".method").textContent = method.toUpperCase();
  made.querySelector(".path").textContent = path;
  made.querySelector(".words").textContent = operation.summary;
  const contents = Object.values((operation.requestBody || {}).content || {});
  const body = contents.length ? named(definitions, contents[0].schema) : null;
  const bodies = body ? (body.anyOf || body.oneOf || [body]).map((each) => named(definitions, each)) : [];
  const fields = new Map(bodies.flatMap((each) => Object.entries(each.properties || {})));
  for (const [name, schema] of fields) {
    const row = made.querySelector("tbody").insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = typeOf(schema);
  }
  if (!fields.size) made.querySelector(".wide").remove();
  return made;
}

async function load() {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`openapi.json: ${answer.status}`);
  const found = await answer.json();
  const routes = document.getElementById("routes");
  for (const [path, operations] of Object.entries(found.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      routes.append(shown(found.components.schemas, method, path, operation));
    }
  }
  state.textContent = `version ${found.info.version}, ${routes.children.length} routes`;
}

load().catch((error) => {
  state.textContent = error.message;
  state.className = "error";
});
