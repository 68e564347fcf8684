"""The report: pure functions from artifacts to one HTML page with inline SVG.

`page.render(ReportInputs) -> str`. Nothing here touches files or knows the stages; the same artifacts give the same
bytes. Names that come from users are escaped in `html.py` and, inside figures, by matplotlib's SVG writer.
"""
