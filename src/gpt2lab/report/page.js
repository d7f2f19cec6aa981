"use strict";
// Shows the values of a chart's curves at the pointer. Names go in as text, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function nearest(places, at) {
  let best = 0;
  for (let i = 1; i < places.length; i++)
    if (Math.abs(places[i] - at) < Math.abs(places[best] - at)) best = i;
  return best;
}

function written(axis, place) {
  if (axis === "hours") return `${Number(place.toPrecision(3))} hours`;
  const whole = Math.round(place).toLocaleString("en-US");
  return axis === "step" ? `step ${whole}` : `${whole} tokens`;
}

function row(tip, colour, text) {
  const line = tip.appendChild(document.createElement("div"));
  if (colour) line.appendChild(document.createElement("i")).className = colour;
  line.append(text);
}

function follow(chart) {
  const { axis, low, high, series } = JSON.parse(chart.dataset.hover);
  const known = series.filter((one) => one.x.length);
  if (!known.length) return;
  const picture = chart.parentElement;
  const tip = picture.appendChild(document.createElement("div"));
  const cursor = chart.appendChild(document.createElementNS(SVG, "line"));
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y2", "100%");
  tip.className = "tip";

  function hide() {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  }

  function show(event) {
    const style = getComputedStyle(chart), frame = chart.getBoundingClientRect();
    const left = parseFloat(style.paddingLeft);
    const width = frame.width - left - parseFloat(style.paddingRight);
    const at = low + ((high - low) * (event.clientX - frame.left - left)) / width;
    const places = known.map((one) => one.x[nearest(one.x, at)]);
    const place = places.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best));
    const share = (place - low) / (high - low);
    tip.replaceChildren();
    row(tip, "", written(axis, place));
    for (const one of known) {
      const i = nearest(one.x, place);
      const error = one.error && one.error[i] ? ` ± ${one.error[i]}` : "";
      const where = one.x[i] !== place ? ` at ${written(axis, one.x[i])}` : "";
      row(tip, one.colour, `${one.name}: ${one.y[i].toLocaleString("en-US", { maximumSignificantDigits: 5 })}${error}${where}`);
    }
    tip.hidden = false;
    cursor.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, `${100 * share}%`);
    const middle = left + share * width, room = picture.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, middle < room / 2 ? middle + 14 : middle - tip.offsetWidth - 14))}px`;
  }

  hide();
  chart.addEventListener("pointermove", show);
  chart.addEventListener("pointerdown", show);
  chart.addEventListener("pointerleave", hide);
}

document.querySelectorAll("svg[data-hover]").forEach(follow);
