"""docs/report.md as a PDF: `make report`.

    python benchmarks/report/pdf.py [--page FILE] [--out FILE]

Needs the packages markdown and weasyprint, which `make report` installs, and the system library
Pango.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "report.md"
OUT = ROOT / "build" / "report.pdf"
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
PAGE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")
EXTENSIONS = ("tables", "fenced_code", "toc", "sane_lists")
STYLE = """
@page {
  size: A4; margin: 20mm 19mm 22mm;
  @bottom-center { content: counter(page) " / " counter(pages); font-size: 8pt; color: #666; }
}
body { font: 9.6pt/1.42 "DejaVu Serif", serif; text-align: justify; hyphens: auto; }
h1, h2, h3, th, table { font-family: "DejaVu Sans", sans-serif; text-align: left; }
h1 { font-size: 17pt; margin: 0 0 4mm; }
h2 { font-size: 12pt; margin: 6mm 0 2mm; break-after: avoid; }
h3 { font-size: 10pt; margin: 4mm 0 1.5mm; break-after: avoid; }
a { color: #0b57a4; text-decoration: none; }
img { display: block; max-width: 100%; max-height: 84mm; margin: 3mm auto; }
table { border-collapse: collapse; font-size: 7.6pt; margin: 2mm auto 3mm; break-inside: avoid; }
th, td { border-bottom: 0.4pt solid #bbb; padding: 0.8mm 2.2mm; }
th { border-bottom: 0.9pt solid #444; }
pre { font-size: 7.6pt; line-height: 1.25; background: #f4f4f4; padding: 2mm; text-align: left; }
code { font-size: 0.88em; hyphens: manual; }
li { margin-bottom: 0.8mm; }
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    options = parser.parse_args()
    try:
        import markdown
        import weasyprint
    except (ImportError, OSError) as error:  # OSError: Pango is not installed
        print(
            f"make report: {error}: pip install markdown weasyprint; weasyprint needs Pango",
            file=sys.stderr,
        )
        return 2
    text = options.page.read_text()
    missing = [each for each in PICTURE.findall(text) if not (options.page.parent / each).exists()]
    if missing:
        print(f"make report: there is no {', '.join(missing)}: make figures", file=sys.stderr)
        return 1
    # Other pages are not in the PDF, so links to them become text.
    text = PAGE_LINK.sub(r"\1", text)
    body = markdown.markdown(text, extensions=list(EXTENSIONS), output_format="html")
    document = f"<html lang='en'><style>{STYLE}</style><body>{body}</body></html>"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Links and pictures are relative to the page.
    rendered = weasyprint.HTML(string=document, base_url=str(options.page.resolve())).render()
    rendered.write_pdf(options.out)
    print(f"written: {options.out}, {len(rendered.pages)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
