// Making elements. Text goes in as text nodes only: names and answers are never markup.

/** The element of the page with this id. */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`the page has no element "${id}"`);
  return element;
}

/** A new element: `properties` are attributes, "class" among them; null and false leave one out. */
export function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in SVG. */
export function makeSvg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Sets the text if it differs: a screen reader is told of changes only. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A table: `columns` are {title, isNumber}, cells are text or elements. */
export function makeTable(caption, columns, rows) {
  const titles = columns.map(({ title, isNumber }) =>
    make("th", { scope: "col", class: isNumber ? "number" : null }, title),
  );
  const body = rows.map((cells) =>
    make("tr", {}, ...cells.map((cell, i) => makeCell(cell, columns[i]))),
  );
  return make(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make(
      "table",
      {},
      make("caption", { class: "sr" }, caption),
      make("thead", {}, make("tr", {}, ...titles)),
      make("tbody", {}, ...body),
    ),
  );
}

function makeCell(cell, { title, isNumber }) {
  return make("td", { class: isNumber ? "number" : null, "data-title": title }, cell);
}
