// Marks the tables that are wider than their frame, so that site.css can say so. The theme frames them when a page is shown.
const frames = new ResizeObserver((seen) =>
  seen.forEach(({ target }) => target.classList.toggle("scrolls", target.scrollWidth > target.clientWidth)),
);
document$.subscribe(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((frame) => frames.observe(frame)));
