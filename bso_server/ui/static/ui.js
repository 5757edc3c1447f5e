// Keeps the page up to date, describes the marks in charts, sorts and filters tables, switches between light and dark.
const root = new URL(document.documentElement.dataset.root, location.href);
const fresh = document.getElementById("fresh");
const policy = window.trustedTypes?.createPolicy("zeus-bso", { createHTML: (text) => text });
const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const QUICK = 2000, SLOW = 30000;
let wait = QUICK, timer = 0, heard = Date.now();

function age(instant) {
  const seconds = (Date.now() - Date.parse(instant)) / 1000;
  if (Math.abs(seconds) < 5) return "just now";
  const [size, name] = units.find(([least]) => Math.abs(seconds) >= least);
  const told = `${Math.floor(Math.abs(seconds) / size)}\u00a0${name}`;
  return seconds < 0 ? `in\u00a0${told}` : `${told}\u00a0ago`;
}

function tellAges() {
  for (const time of document.querySelectorAll("time.ago")) {
    const told = age(time.dateTime);
    if (time.textContent !== told) time.textContent = told;
  }
}

const LIVE = "[data-live]", live = () => document.querySelector(LIVE);

function pathOf(element) {
  const place = [];
  for (; element && !element.matches(LIVE); element = element.parentElement) {
    if (element.id) return [`#${CSS.escape(element.id)}`, ...place].join(">");
    place.unshift(`:nth-child(${[...element.parentElement.children].indexOf(element) + 1})`);
  }
  return [LIVE, ...place].join(">");
}

function replace(text) {
  const page = new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, "text/html");
  const old = live(), main = page.querySelector(LIVE);
  if (!main) return;
  document.title = page.title;
  const open = [...old.querySelectorAll("details[open]")].map((each) => each.id);
  const typed = [...old.querySelectorAll(":is(input, select)[id]")].map((each) => [each.id, each.value, each.checked]);
  const focused = old.contains(document.activeElement) ? pathOf(document.activeElement) : null;
  const across = old.querySelector(".scroll")?.scrollLeft, x = scrollX, y = scrollY;
  hide();
  old.replaceWith(document.adoptNode(main));
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  for (const [id, value, checked] of typed) Object.assign(document.getElementById(id) ?? {}, { value, checked });
  const scroll = main.querySelector(".scroll");
  if (scroll && across) scroll.scrollLeft = across;
  arrange(main);
  arrangePlots();
  if (focused) document.querySelector(focused)?.focus({ preventScroll: true });
  scrollTo(x, y);
}

async function poll() {
  try {
    const headers = { "If-None-Match": live().dataset.live };
    const answer = await fetch(location.href, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.status === 401 || answer.status === 404) return location.reload();
    if (answer.status !== 304 && !answer.ok) throw new Error(answer.status);
    if (answer.status !== 304) replace(await answer.text());
    heard = Date.now();
    wait = QUICK;
    fresh.classList.remove("stale");
    if (fresh.textContent) fresh.textContent = "";
  } catch {
    wait = Math.min(wait * 2, SLOW);
    const since = new Date(heard).toLocaleTimeString();
    fresh.classList.add("stale");
    if (!fresh.textContent) fresh.textContent = `Stale since ${since}: the server does not answer`;
  }
  tellAges();
  again();
}

function again() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, wait);
}

const marks = "a[aria-label], use[aria-label]";
let tip = null, on = null;

function hide() {
  tip?.remove();
  on?.classList.remove("on");
  tip = on = null;
}

function show(mark) {
  if (mark === on) return;
  hide();
  on = mark;
  mark.classList.add("on");
  tip = document.createElement("div");
  tip.id = "tip";
  tip.textContent = mark.getAttribute("aria-label");
  document.body.append(tip);
  const box = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = box.left + box.width / 2 - own.width / 2, above = box.top - own.height - 8;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - own.width - 8))}px`;
  tip.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
}

document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.(`.plot :is(${marks})`);
  if (mark) show(mark.closest("a") ?? mark);
  else if (on && !on.closest(".plot").matches(":focus-visible")) hide();
});
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return hide();
  const plot = event.target.closest?.(".plot");
  if (!plot) return;
  if (event.key === "Enter" && on?.matches("a")) return location.assign(new URL(on.getAttribute("href"), document.baseURI));
  const all = [...plot.querySelectorAll(`:scope > :is(${marks})`)], at = all.indexOf(on);
  const next = { ArrowRight: at + 1, ArrowLeft: at < 0 ? all.length - 1 : at - 1, Home: 0, End: all.length - 1 }[event.key];
  const range = plot.dataset.across && seen(plot), third = range && (range[1] - range[0]) / 6;
  if (event.key === "+" && range) zoom(plot.dataset.across, [range[0] + third, range[1] - third]);
  if (event.key === "-" && range) zoom(plot.dataset.across, null);
  if (next === undefined || !all.length) return;
  event.preventDefault();
  show(all[Math.max(0, Math.min(next, all.length - 1))]);
});

// Charts with the same horizontal axis share the cursor and the zoom. A view is [low, high] on that axis.
const views = {}, NS = "http://www.w3.org/2000/svg", PLACES = ["x", "x1", "x2", "cx"];
const plots = (across) => [...document.querySelectorAll(across ? `.plot[data-across=${across}]` : ".plot[data-across]")];
const domain = (plot) => [Number(plot.dataset.low), Number(plot.dataset.high)];
const seen = (plot) => views[plot.dataset.across] ?? domain(plot);
let drag = null, dragged = false;

function draw(tag, attributes, text) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function drawView(plot) {
  const [low, high] = domain(plot), [from, to] = seen(plot), width = to - from;
  const place = (share) => (low + share * (high - low) - from) / width;
  const isAll = !views[plot.dataset.across];
  plot.classList.toggle("zoomed", !isAll);
  for (const element of plot.querySelectorAll("[x], [x1], [cx]")) {
    if (element.matches(".inner, .made")) continue;
    const first = (element.places ??= Object.fromEntries([...PLACES, "width"].map((name) => [name, element.getAttribute(name)])));
    // Places that are no share of the axis, and lines and labels that span the chart or stand at its end, stay.
    if (first.x1 === "0" || !/^(?!100%)[\d.]+%$/.test(first.x ?? first.x1 ?? first.cx)) continue;
    for (const name of PLACES) if (first[name]) element.setAttribute(name, `${100 * place(parseFloat(first[name]) / 100)}%`);
    if (first.width?.endsWith("%")) element.setAttribute("width", `${parseFloat(first.width) * (high - low) / width}%`);
    const at = place(parseFloat(first.x ?? first.x1 ?? first.cx) / 100);
    element.classList.toggle("out", !first.width && (at < -1e-9 || at > 1 + 1e-9) || (!isAll && element.matches(".tick.mid")));
  }
  for (const inner of plot.querySelectorAll(".inner")) {
    inner.setAttribute("viewBox", `${1000 * (from - low) / (high - low)} 0 ${1000 * width / (high - low)} ${plot.getAttribute("height")}`);
  }
  plot.querySelectorAll(".made.tick").forEach((each) => each.remove());
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], step = steps.find((each) => width / each <= 8) ?? 1000;
  for (let value = Math.ceil(from / step) * step; !isAll && value <= to; value += step) {
    const y = Number(plot.getAttribute("height")) + 20;
    plot.append(draw("text", { x: `${100 * (value - from) / width}%`, y, class: "tick mid made" }, value));
  }
}

function zoom(across, range) {
  const least = across === "run" ? 2 : 1;
  if (range && range[1] - range[0] < least) return;
  if (range) views[across] = range;
  else delete views[across];
  plots(across).forEach(drawView);
}

function valueAt(plot, event) {
  const box = plot.getBoundingClientRect(), [from, to] = seen(plot);
  return from + Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)) * (to - from);
}

function clearCursors() {
  document.querySelectorAll(".cursor").forEach((each) => each.remove());
}

function drawCursors(plot, value) {
  clearCursors();
  for (const each of plots(plot.dataset.across)) {
    const [from, to] = seen(each), at = (value - from) / (to - from);
    if (at < 0 || at > 1) continue;
    const x = `${100 * at}%`, height = each.getAttribute("height");
    each.append(draw("line", { x1: x, x2: x, y1: 0, y2: height, class: "cursor made" }));
    each.append(draw("text", { x, y: -4, class: "cursor made mid" }, `${each.dataset.across} ${Math.round(value)}`));
    if (drag && drag.plot.dataset.across === each.dataset.across) {
      const [a, b] = [drag.from, value].sort((one, other) => one - other).map((end) => 100 * (end - from) / (to - from));
      each.append(draw("rect", { x: `${a}%`, width: `${b - a}%`, y: 0, height, class: "cursor made" }));
    }
  }
}

// A line through the running means of a chart's marks; the last one's weight is a third.
function smooth(plot) {
  const marks = [...plot.querySelectorAll(":scope > a > use, :scope > use")], steps = [];
  let mean = null;
  for (const mark of marks) {
    const x = parseFloat(mark.places?.x ?? mark.getAttribute("x")), y = Number(mark.getAttribute("y"));
    mean = mean === null ? y : mean + (y - mean) / 3;
    steps.push(`${10 * x} ${mean.toFixed(1)}`);
  }
  const height = plot.getAttribute("height");
  const inner = draw("svg", { viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", width: "100%", height, class: "inner smooth" });
  inner.append(draw("path", { class: "line", d: `M${steps.join("L")}` }));
  plot.append(inner);
}

const smoothed = new Set();

function arrangePlots() {
  for (const plot of plots()) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "tool", textContent: "Smooth", id: `smooth-${plot.id}` });
    button.ariaPressed = smoothed.has(plot.id);
    plot.after(button);
    if (smoothed.has(plot.id)) smooth(plot);
    drawView(plot);
  }
}

document.addEventListener("pointermove", (event) => {
  const plot = drag?.plot ?? event.target.closest?.(".plot[data-across]");
  if (plot) drawCursors(plot, valueAt(plot, event));
  else clearCursors();
});
document.addEventListener("pointerdown", (event) => {
  const plot = event.target.closest?.(".plot[data-across]");
  dragged = false;
  if (plot && event.button === 0 && event.pointerType !== "touch") drag = { plot, from: valueAt(plot, event), x: event.clientX };
});
document.addEventListener("pointerup", (event) => {
  if (!drag) return;
  const { plot, from, x } = drag;
  drag = null;
  dragged = Math.abs(event.clientX - x) > 8;
  if (dragged) zoom(plot.dataset.across, [from, valueAt(plot, event)].sort((one, other) => one - other));
  clearCursors();
});
document.addEventListener("dragstart", (event) => event.target.closest?.(".plot") && event.preventDefault());
document.addEventListener("dblclick", (event) => {
  const plot = event.target.closest?.(".plot[data-across]");
  if (plot) zoom(plot.dataset.across, null);
});
document.addEventListener("click", (event) => {
  if (dragged && event.target.closest?.(".plot")) event.preventDefault();
  const button = event.target.closest?.("[id^=smooth-]");
  if (!button) return;
  const id = button.id.slice("smooth-".length), plot = document.getElementById(id);
  if (smoothed.delete(id)) plot.querySelector(".smooth").remove();
  else smoothed.add(id) && smooth(plot);
  button.ariaPressed = smoothed.has(id);
  drawView(plot);
});

// Tables: chosen order by the table's id as [column, direction], and texts that filter them.
const orders = {};

function valueOf(row, column) {
  const cell = [...row.cells].flatMap((each) => Array(each.colSpan).fill(each))[column];
  const value = cell?.querySelector("data, time");
  const number = Number(value?.value ?? NaN);
  return value?.dateTime ?? (Number.isNaN(number) ? cell?.textContent.trim() ?? "" : number);
}

function order(table) {
  const [column, direction] = orders[table.id];
  const body = document.createElement("tbody");
  const rows = [...table.querySelectorAll("tr.run")].map((row) => [valueOf(row, column), row]);
  const known = (value) => typeof value === "number" || (value !== "" && value !== "—");
  rows.sort(([a], [b]) => known(b) - known(a)
    || direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
  body.append(...rows.map(([, row]) => row));
  table.append(body);
  table.classList.add("sorted");
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    if (at === column) head.ariaSort = direction > 0 ? "ascending" : "descending";
    else head.removeAttribute("aria-sort");
  });
}

function filter(field) {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean), table = document.getElementById(field.dataset.filter);
  if (!table) return;
  for (const row of table.querySelectorAll("tr.run")) {
    const text = row.textContent.toLowerCase();
    row.classList.toggle("out", !words.every((word) => text.includes(word)));
  }
  table.classList.toggle("sorted", words.length > 0 || table.id in orders);
}

function arrange(part) {
  for (const table of part.querySelectorAll("table[data-sort]")) {
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
    }
    if (orders[table.id]) order(table);
  }
  for (const field of part.querySelectorAll("[data-filter]")) {
    field.closest(".filter").hidden = false;
    filter(field);
  }
}

document.addEventListener("click", (event) => {
  const head = event.target.closest?.("table[data-sort] thead th");
  if (!head) return;
  const table = head.closest("table"), known = orders[table.id];
  // Numbers begin with the largest.
  const first = head.classList.contains("num") ? -1 : 1;
  orders[table.id] = [head.cellIndex, known?.[0] === head.cellIndex ? -known[1] : first];
  order(table);
});
document.addEventListener("input", (event) => {
  if (event.target.dataset.filter) filter(event.target);
});
arrange(document);
arrangePlots();

if (live()) {
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
  poll();
}
