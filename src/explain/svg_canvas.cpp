// Rectangles, lines and text as SVG, numbers short enough to be read.
#include "explain/svg_canvas.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>

#include "explain/words.hpp"

namespace lean::explain {
namespace {

/// Coordinates to a hundredth of a pixel, without trailing zeros.
std::string px(double value) {
  std::ostringstream out = words::stream();
  out << std::round(value * 100.0) / 100.0;
  return out.str();
}

std::string escaped(const std::string& words) {
  std::string out;
  for (const char c : words) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      default: out += c;
    }
  }
  return out;
}

std::uint32_t srgb_byte(double linear) {
  const double x = std::clamp(linear, 0.0, 1.0);
  const double encoded = x <= 0.0031308 ? 12.92 * x : 1.055 * std::pow(x, 1.0 / 2.4) - 0.055;
  return static_cast<std::uint32_t>(std::lround(encoded * 255.0));
}

}  // namespace

double text_width(const std::string& text, double size_px) { return 0.58 * size_px * static_cast<double>(text.size()); }

// OKLab to sRGB: B. Ottosson, "A perceptual color space for image processing" (2020).
std::string colour(double hue_degrees, double lightness) {
  constexpr double kChroma = 0.105;  // within sRGB for every hue at the lightness used here
  const double hue = hue_degrees * 3.14159265358979323846 / 180.0;
  const double a = kChroma * std::cos(hue);
  const double b = kChroma * std::sin(hue);
  const double l = std::pow(lightness + 0.3963377774 * a + 0.2158037573 * b, 3.0);
  const double m = std::pow(lightness - 0.1055613458 * a - 0.0638541728 * b, 3.0);
  const double s = std::pow(lightness - 0.0894841775 * a - 1.2914855480 * b, 3.0);
  const std::array<double, 3> linear = {4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
                                        -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
                                        -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s};
  std::ostringstream out = words::stream();
  out << '#' << std::hex << std::setfill('0');
  for (const double channel : linear) out << std::setw(2) << srgb_byte(channel);
  return out.str();
}

SvgCanvas::SvgCanvas() : out_(words::stream()) {}

void SvgCanvas::rect(const Box& box, const std::string& fill) {
  out_ << "<rect x=\"" << px(box.x) << "\" y=\"" << px(box.y) << "\" width=\"" << px(box.width) << "\" height=\"" << px(box.height)
       << "\" fill=\"" << fill << "\"/>\n";
}

void SvgCanvas::line(Point from, Point to, const char* stroke, const char* extra) {
  out_ << "<line x1=\"" << px(from.x) << "\" y1=\"" << px(from.y) << "\" x2=\"" << px(to.x) << "\" y2=\"" << px(to.y)
       << "\" stroke=\"" << stroke << "\" " << extra << "/>\n";
}

void SvgCanvas::text(Point at, const std::string& words, const TextStyle& style) {
  out_ << "<text x=\"" << px(at.x) << "\" y=\"" << px(at.y) << "\" font-size=\"" << px(style.size_px) << "\" fill=\"" << style.fill
       << "\" text-anchor=\"" << style.anchor << "\"" << (style.bold ? " font-weight=\"600\"" : "") << ">" << escaped(words)
       << "</text>\n";
}

std::string SvgCanvas::document(double width_px, double height_px, const std::string& title) const {
  std::ostringstream out = words::stream();
  out << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\""
      << px(width_px) << "\" height=\"" << px(height_px) << "\" viewBox=\"0 0 " << px(width_px) << ' ' << px(height_px)
      << "\" font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">\n<title>" << escaped(title) << "</title>\n"
      << "<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
      << "<rect width=\"6\" height=\"6\" fill=\"#f3f4f6\"/><line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke=\"#d1d5db\" "
      << "stroke-width=\"1.6\"/></pattern></defs>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
      << out_.str() << "</svg>\n";
  return out.str();
}

}  // namespace lean::explain
