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
  const sections = [...page.querySelectorAll(".md-typeset__scrollwrap, table")].filter((one) => !one.closest("table table"));
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().replaceAll("_", "-").split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase().replaceAll("_", "-");
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const one of sections) {
      const all = [...one.querySelectorAll("tbody tr")];
      one.hidden = all.length > 0 && all.every((row) => row.hidden);
    }
    page.classList.toggle("filtered", words.length > 0);
  });
});
