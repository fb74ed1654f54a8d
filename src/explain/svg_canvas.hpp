// SvgCanvas: the few SVG elements a schedule is drawn with, and colours of equal brightness.
// Knows nothing of schedules.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace lean::explain {

struct Box {
  double x = 0.0;
  double y = 0.0;
  double width = 0.0;
  double height = 0.0;
};

struct Point {
  double x = 0.0;
  double y = 0.0;
};

struct TextStyle {
  double size_px = 12.0;
  const char* fill = "#374151";
  const char* anchor = "start";  // start, middle, end
  bool bold = false;
};

/// Width in pixels a text takes, on the safe side for the usual sans-serif fonts.
[[nodiscard]] double text_width(const std::string& text, double size_px);

/// "#rrggbb" of a hue in degrees, at the given lightness in [0, 1], in OKLCH: equal lightness looks equally bright.
[[nodiscard]] std::string colour(double hue_degrees, double lightness);

class SvgCanvas {
 public:
  SvgCanvas();

  void rect(const Box& box, const std::string& fill);
  void line(Point from, Point to, const char* stroke, const char* extra = "");
  void text(Point at, const std::string& words, const TextStyle& style);

  /// The finished document.
  [[nodiscard]] std::string document(double width_px, double height_px, const std::string& title) const;

 private:
  std::ostringstream out_;
};

}  // namespace lean::explain
