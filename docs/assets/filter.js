// A field above the tables of the pages of flags, metrics and errors that hides the rows without the words typed.
document.addEventListener("DOMContentLoaded", () => {
  const page = document.querySelector("article");
  const rows = page ? [...page.querySelectorAll("table tbody tr")] : [];
  if (rows.length < 40) return;
  const field = document.createElement("input");
  field.type = "search";
  field.className = "filter";
  field.placeholder = "Filter these tables, e.g. learning rate";
  field.setAttribute("aria-label", field.placeholder);
  page.querySelector("h1").after(field);
  const parts = [...page.children].filter((part) => part !== field && part.tagName !== "H1");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().replaceAll("_", "-").split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase().replaceAll("_", "-");
      row.hidden = !words.every((word) => text.includes(word));
    }
    // Of the rest only tables with such rows are left, below the headings of their sections.
    const headings = {};
    for (const part of parts) {
      const shown = [...part.querySelectorAll("tbody tr")].some((row) => !row.hidden);
      part.hidden = words.length > 0 && !shown;
      if (/^H[23]$/.test(part.tagName)) {
        headings[part.tagName] = part;
        if (part.tagName === "H2") headings.H3 = null;
      } else if (shown) {
        for (const heading of Object.values(headings)) if (heading) heading.hidden = false;
      }
    }
  });
});
