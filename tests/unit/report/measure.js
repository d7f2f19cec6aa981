// Writes into the document what a reader with a ruler and a mouse would find: test_report.py puts it into a page.
const size = (e) => parseFloat(getComputedStyle(e).fontSize);
const seen = (e) => e.getClientRects().length > 0 && e.textContent.trim() !== "";
const root = document.documentElement, found = {};
const texts = [...document.querySelectorAll("body *")].filter((e) => seen(e) &&
  !["SCRIPT", "STYLE"].includes(e.tagName) && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
const own = (e) => e.closest(".scroll") === null;
const box = (e) => e.getBoundingClientRect();
found.width = root.clientWidth;
found.dark = matchMedia("(prefers-color-scheme: dark)").matches;
found.paper = getComputedStyle(document.body).backgroundColor;
found.ink = getComputedStyle(document.body).color;
found.texts = texts.length;
found.smallest = Math.min(...texts.map(size));
found.scaled = texts.filter((e) => e.tagName === "text").map((e) => box(e).height / size(e));
found.overflow = root.scrollWidth - root.clientWidth;
found.outside = texts.filter((e) => own(e) && (box(e).right > root.clientWidth + 1 || box(e).left < -1))
  .map((e) => e.textContent);
found.broken = [...document.querySelectorAll("td, th, .tile b")].filter((e) => seen(e) &&
  !/[ -]/.test(e.textContent) && e.children.length === 0).filter((e) => {
    const range = document.createRange();
    range.selectNodeContents(e);
    return new Set([...range.getClientRects()].map((r) => Math.round(r.top))).size > 1;
  }).map((e) => e.textContent);
found.cut = [...document.querySelectorAll(".forecast")].map((e) => e.parentElement).filter((e) =>
  e.scrollWidth > e.clientWidth).length;
found.scrolls = [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth).length;
const labels = (svg, kind) => [...svg.querySelectorAll(kind)].map(box);
found.overlaps = [];
for (const svg of document.querySelectorAll("svg.chart")) if (seen(svg)) {
  const across = labels(svg, ".x"), down = labels(svg, ".y").reverse();
  const meet = across.some((b, i) => i && across[i - 1].right > b.left) ||
    down.some((b, i) => i && down[i - 1].top < b.bottom && down[i - 1].bottom > b.top);
  if (meet) found.overlaps.push(svg.getAttribute("aria-label"));
}
const tip = () => document.querySelector("svg.chart[data-hover]").parentElement.querySelector(".tip");
const chart = document.querySelector("svg.chart[data-hover]"), frame = box(chart);
found.tips = [0, 0.5, 1].map((share) => {
  const at = frame.left + 62 + share * (frame.width - 78);
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX: at, clientY: frame.top + 50 }));
  return { text: tip().innerText, left: box(tip()).left, right: box(tip()).right,
    inside: box(tip()).top >= frame.top && box(tip()).bottom <= frame.bottom };
});
chart.dispatchEvent(new PointerEvent("pointerleave"));
found.hidden = tip().hidden;
const charts = () => [...document.querySelectorAll("svg.chart[data-hover]")].filter(seen)
  .map((e) => JSON.parse(e.dataset.hover).axis);
found.axes = ["step", "tokens", "hours"].map((axis) => {
  document.querySelector(`label[for=by-${axis}]`).click();
  return charts();
});
parent.document.body.replaceChildren(JSON.stringify(found));
