// Every element of the page with text of its own that is seen: its colour, and that of the nearest background.
const parts = (colour) => colour.match(/[\d.]+/g).map(Number);
const opaque = (element) => {
  const colour = parts(getComputedStyle(element).backgroundColor);
  return colour.length === 3 || colour[3] === 1 ? colour.slice(0, 3) : opaque(element.parentElement);
};
return [...document.querySelectorAll("body *:not(script)")]
  .filter((element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((element) => element.getClientRects().length)
  .map((element) => {
    const style = getComputedStyle(element);
    const drawn = element.tagName === "text" || element.tagName === "tspan";
    return {
      tag: element.tagName.toLowerCase(),
      text: element.textContent.trim().slice(0, 40),
      ink: parts(drawn ? style.fill : style.color).slice(0, 3),
      paper: opaque(element),
    };
  });
