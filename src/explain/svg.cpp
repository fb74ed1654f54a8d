// A ScheduleMap as a figure, the paper's Fig. 1: a row a worker, a box a segment, as wide as it costs. Called by explain_schedule()
// and, with several maps side by side, by `lean demo`.
#include <algorithm>
#include <cmath>
#include <vector>

#include "explain/schedule_map.hpp"
#include "explain/svg_canvas.hpp"
#include "explain/words.hpp"

namespace lean::explain {
namespace {

constexpr double kMargin = 28.0;
constexpr double kColumnGap = 30.0;
constexpr double kRowGap = 26.0;
constexpr double kGutter = 34.0;  // worker numbers, left of the bars
constexpr double kPanelHeader = 62.0;
constexpr double kAxisHeight = 24.0;
constexpr double kRoomyPitch = 10.0;  // rows at least this high get tile lines and feet
constexpr const char* kInk = "#111827";
constexpr const char* kSoftInk = "#6b7280";
constexpr const char* kGrid = "#e5e7eb";

/// Height of one worker's row: generous for a few workers, thin for a GPU's.
double row_pitch(std::int32_t workers) {
  if (workers <= 4) return 34.0;
  if (workers <= 8) return 26.0;
  if (workers <= 16) return 18.0;
  if (workers <= 40) return 12.0;
  return std::clamp(640.0 / workers, 0.2, 9.0);
}

/// The hue tells sequences apart (outputs, when there is one sequence), two shades their neighbouring kv heads.
std::string output_colour(const schedule::Output& output, const ScheduleMap& map) {
  constexpr double kGoldenAngle = 137.508;  // neighbours never look alike
  constexpr double kFirstHue = 250.0;
  std::int64_t hue = output.sequence;
  bool light = ((output.kv_head + output.row_block) & 1) != 0;
  if (map.shape.batch == 1) {
    hue = output.kv_head + static_cast<std::int64_t>(output.row_block) * map.shape.kv_heads;
    light = false;
  }
  return colour(std::fmod(kFirstHue + kGoldenAngle * static_cast<double>(hue % 3600), 360.0), light ? 0.82 : 0.73);
}

/// A round step that gives at most `count` ticks up to `end`.
std::int64_t tick_step(std::int64_t end, std::int64_t count) {
  for (std::int64_t power = 1;; power *= 10) {
    for (const std::int64_t digit : {1, 2, 5}) {
      if (end / (digit * power) <= count) return digit * power;
    }
  }
}

struct PanelPlace {
  Box bars;                 // the rows, without header, gutter and axis
  std::int64_t axis_tiles;  // what the width stands for

  [[nodiscard]] double x(std::int64_t tiles) const {
    return bars.x + bars.width * static_cast<double>(tiles) / static_cast<double>(std::max<std::int64_t>(axis_tiles, 1));
  }
};

/// One panel: a map's workers as rows.
class PanelPainter {
 public:
  PanelPainter(SvgCanvas& canvas, const ScheduleMap& map, const PanelPlace& place)
      : canvas_(canvas),
        map_(map),
        place_(place),
        min_drawn_px_(map.segments > 10'000 ? 3.0 : 1.0),
        pitch_(row_pitch(map.workers_asked)),
        bar_height_(roomy() ? pitch_ * 0.80 : (pitch_ >= 3.0 ? pitch_ - 1.0 : pitch_ * 0.9)) {}

  void paint() {
    paint_header();
    paint_axis();
    for (std::int32_t worker = 0; worker < map_.workers_asked; ++worker) paint_worker(worker);
    paint_equal_share();
  }

 private:
  [[nodiscard]] bool roomy() const { return pitch_ >= kRoomyPitch; }
  [[nodiscard]] double row_y(std::int32_t worker) const { return place_.bars.y + pitch_ * worker + (pitch_ - bar_height_) / 2.0; }

  void paint_header() {
    const double left = place_.bars.x - kGutter;
    const double y = place_.bars.y - kPanelHeader;
    canvas_.text({left, y + 14.0}, words::policy_words(map_), {.size_px = 14.0, .fill = kInk, .bold = true});
    canvas_.text(
        {left, y + 32.0},
        "balance " + words::percent(map_.tiles.ratio()) + " in tiles, " + words::percent(map_.cost_units.ratio()) + " in cost",
        {.size_px = 12.5, .fill = kInk});
    canvas_.text({left, y + 48.0}, words::workers_words(map_) + ", " + words::sharing_words(map_),
                 {.size_px = 11.5, .fill = kSoftInk});
  }

  void paint_axis() {
    const double bottom = place_.bars.y + place_.bars.height;
    const std::int64_t step = tick_step(place_.axis_tiles, static_cast<std::int64_t>(place_.bars.width / 70.0));
    for (std::int64_t tiles = 0; tiles <= place_.axis_tiles; tiles += step) {
      const double x = place_.x(tiles);
      canvas_.line({x, place_.bars.y}, {x, bottom + 4.0}, kGrid);
      canvas_.text({x, bottom + 16.0}, words::grouped(tiles), {.size_px = 10.5, .fill = kSoftInk, .anchor = "middle"});
    }
  }

  void paint_worker(std::int32_t worker) {
    paint_worker_number(worker);
    std::int64_t tiles = 0;
    if (worker < static_cast<std::int32_t>(map_.workers.size())) {
      const WorkerShare& share = map_.workers[static_cast<std::size_t>(worker)];
      paint_bar(share, row_y(worker));
      tiles = share.tiles;
    }
    if (tiles == map_.tiles.max) return;
    Box idle = span(tiles, map_.tiles.max, row_y(worker));
    if (!roomy()) idle.height = pitch_;
    canvas_.rect(idle, "url(#idle)");
  }

  void paint_worker_number(std::int32_t worker) {
    const std::int64_t step =
        pitch_ >= 11.0 ? 1 : tick_step(map_.workers_asked, static_cast<std::int64_t>(place_.bars.height / 30.0));
    if (worker % step != 0) return;
    const double middle = row_y(worker) + bar_height_ / 2.0;
    canvas_.text({place_.bars.x - 8.0, middle + 3.5}, std::to_string(worker), {.size_px = 10.5, .fill = kSoftInk, .anchor = "end"});
  }

  [[nodiscard]] Box span(std::int64_t tile_begin, std::int64_t tile_end, double y) const {
    return {place_.x(tile_begin), y, place_.x(tile_end) - place_.x(tile_begin), bar_height_};
  }

  void paint_bar(const WorkerShare& share, double y) {
    std::int64_t begin = 0;  // of what is not drawn yet
    std::int64_t end = 0;
    for (std::size_t i = 0; i < share.segments.size(); ++i) {
      const schedule::Segment& segment = share.segments[i];
      end += segment.tile_end - segment.tile_begin;
      const Box box = span(begin, end, y);
      if (box.width < min_drawn_px_ && i + 1 < share.segments.size()) continue;
      const double gap = std::min(1.2, box.width * 0.2);  // tells neighbours apart
      canvas_.rect({box.x, box.y, box.width - gap, box.height}, output_colour(segment.output, map_));
      paint_details(segment, box, begin + segment.tile_end - segment.tile_begin == end);
      begin = end;
    }
    begin = 0;
    for (const schedule::Segment& segment : share.segments) {
      end = begin + segment.tile_end - segment.tile_begin;
      paint_cuts(segment, span(begin, end, y));
      begin = end;
    }
  }

  /// White lines between tiles, and the output's name, where there is room.
  void paint_details(const schedule::Segment& segment, const Box& box, bool alone) {
    const double bottom = box.y + box.height;
    const double tile_width = place_.bars.width / static_cast<double>(std::max<std::int64_t>(place_.axis_tiles, 1));
    if (alone && roomy() && tile_width >= 7.0) {
      for (std::int64_t tile = segment.tile_begin + 1; tile < segment.tile_end; ++tile) {
        const double x = box.x + tile_width * static_cast<double>(tile - segment.tile_begin);
        canvas_.line({x, box.y}, {x, bottom}, "#ffffff", "stroke-width=\"0.8\" stroke-opacity=\"0.65\"");
      }
    }
    const std::string name = segment_name(segment);
    constexpr double kNameSize = 10.5;
    if (!alone || box.height < 13.0 || text_width(name, kNameSize) + 8.0 > box.width) return;
    canvas_.text({box.x + box.width / 2.0, box.y + box.height / 2.0 + 3.6}, name,
                 {.size_px = kNameSize, .fill = kInk, .anchor = "middle"});
  }

  [[nodiscard]] std::string segment_name(const schedule::Segment& segment) const {
    std::string name = map_.shape.batch == 1 ? "head " : std::to_string(segment.output.sequence) + ".";
    name += std::to_string(segment.output.kv_head);
    if (map_.shape.row_blocks(map_.sequences[static_cast<std::size_t>(segment.output.sequence)]) > 1) {
      name += "." + std::to_string(segment.output.row_block);
    }
    return name;
  }

  /// A dark edge where the output goes on at another worker, and a dark foot under the whole of it where there is room.
  void paint_cuts(const schedule::Segment& segment, const Box& box) {
    if (segment.sole()) return;
    const double edge = std::min(roomy() ? 2.4 : 1.4, box.width / 2.0);
    if (segment.tile_begin > 0) canvas_.rect({box.x, box.y, edge, box.height}, kInk);
    if (segment.tile_end < segment.output.tiles) canvas_.rect({box.x + box.width - edge, box.y, edge, box.height}, kInk);
    if (roomy()) canvas_.rect({box.x, box.y + box.height - 2.0, box.width, 2.0}, kInk);
  }

  void paint_equal_share() {
    const double x =
        place_.bars.x + place_.bars.width * map_.tiles.mean / static_cast<double>(std::max<std::int64_t>(place_.axis_tiles, 1));
    canvas_.line({x, place_.bars.y - 5.0}, {x, place_.bars.y + place_.bars.height}, "#b91c1c",
                 "stroke-width=\"1.3\" stroke-dasharray=\"4 3\"");
  }

  SvgCanvas& canvas_;
  const ScheduleMap& map_;
  PanelPlace place_;
  double min_drawn_px_;  // narrower neighbours are drawn as one
  double pitch_;
  double bar_height_;
};

/// The lengths of the batch in line order, one bar a sequence (of the longest of a few, when there are very many).
void paint_lengths(SvgCanvas& canvas, const ScheduleMap& map, const Box& box) {
  const auto count = static_cast<std::int64_t>(map.sequences.size());
  const std::int64_t bars = std::min(count, static_cast<std::int64_t>(box.width / 2.0));
  std::int32_t longest = 1;
  for (const schedule::SequenceWork& sequence : map.sequences) longest = std::max(longest, sequence.kv_tokens);
  const double pitch = std::min(box.width / static_cast<double>(bars), 60.0);
  for (std::int64_t bar = 0; bar < bars; ++bar) {
    std::int64_t tallest = share_begin(count, bar, bars);
    for (std::int64_t b = tallest; b < share_begin(count, bar + 1, bars); ++b) {
      if (map.sequences[static_cast<std::size_t>(b)].kv_tokens > map.sequences[static_cast<std::size_t>(tallest)].kv_tokens)
        tallest = b;
    }
    const double tokens = map.sequences[static_cast<std::size_t>(tallest)].kv_tokens;
    const double height = std::max(1.0, box.height * tokens / longest);
    canvas.rect({box.x + pitch * static_cast<double>(bar), box.y + box.height - height, pitch * 0.86, height},
                output_colour({.sequence = tallest}, map));
    if (pitch >= 24.0) {
      canvas.text({box.x + pitch * (static_cast<double>(bar) + 0.43), box.y + box.height + 13.0}, std::to_string(tallest),
                  {.size_px = 10.5, .fill = kSoftInk, .anchor = "middle"});
    }
  }
  canvas.line({box.x, box.y + box.height + 0.5}, {box.x + pitch * static_cast<double>(bars), box.y + box.height + 0.5}, kGrid);
  canvas.text({box.x, box.y - 8.0}, "tokens of each sequence, up to " + words::grouped(longest),
              {.size_px = 11.5, .fill = kSoftInk});
}

void paint_legend(SvgCanvas& canvas, const ScheduleMap& map, Point at) {
  constexpr double kSwatch = 26.0;
  constexpr double kHeight = 12.0;
  double x = at.x;
  const auto entry = [&](const std::string& words, const auto& paint_swatch) {
    paint_swatch(Box{x, at.y, kSwatch, kHeight});
    canvas.text({x + kSwatch + 7.0, at.y + 10.0}, words, {.size_px = 11.5});
    x += kSwatch + 7.0 + text_width(words, 11.5) * 0.9 + 22.0;
  };
  entry(map.shape.batch == 1 ? "colour: output" : "colour: sequence, shade: kv head", [&](const Box& box) {
    for (std::int32_t part = 0; part < 4; ++part) {
      const schedule::Output output = {.sequence = part / 2, .kv_head = map.shape.batch == 1 ? part : part % 2};
      canvas.rect({box.x + box.width / 4.0 * part, box.y, box.width / 4.0, box.height}, output_colour(output, map));
    }
  });
  entry("shared output, cut at the dark edge", [&](const Box& box) {
    canvas.rect(box, output_colour({}, map));
    canvas.rect({box.x + box.width - 2.4, box.y, 2.4, box.height}, kInk);
    canvas.rect({box.x, box.y + box.height - 2.0, box.width, 2.0}, kInk);
  });
  entry("idle until the longest is done", [&](const Box& box) { canvas.rect(box, "url(#idle)"); });
  entry("equal share", [&](const Box& box) {
    canvas.line({box.x + box.width / 2.0, box.y}, {box.x + box.width / 2.0, box.y + box.height}, "#b91c1c",
                "stroke-width=\"1.3\" stroke-dasharray=\"4 3\"");
  });
}

/// The longest bar of all panels asked for as many workers.
std::int64_t axis_tiles_for(std::int32_t workers_asked, const std::vector<ScheduleMap>& maps) {
  std::int64_t tiles = 1;
  for (const ScheduleMap& map : maps) {
    if (map.workers_asked == workers_asked) tiles = std::max(tiles, map.tiles.max);
  }
  return tiles;
}

/// Paints the panels in rows of `columns`; returns where the next thing may begin.
double paint_panels(SvgCanvas& canvas, const std::vector<ScheduleMap>& maps, const SvgOptions& options, double y) {
  const auto columns = static_cast<std::size_t>(std::max(1, options.columns));
  const double column_width =
      (options.width_px - 2.0 * kMargin - kColumnGap * static_cast<double>(columns - 1)) / static_cast<double>(columns);
  for (std::size_t first = 0; first < maps.size(); first += columns) {
    double tallest = 0.0;
    for (std::size_t i = first; i < std::min(first + columns, maps.size()); ++i) {
      const ScheduleMap& map = maps[i];
      const double height = row_pitch(map.workers_asked) * map.workers_asked;
      const double x = kMargin + static_cast<double>(i - first) * (column_width + kColumnGap) + kGutter;
      PanelPainter(
          canvas, map,
          {.bars = {x, y + kPanelHeader, column_width - kGutter, height}, .axis_tiles = axis_tiles_for(map.workers_asked, maps)})
          .paint();
      tallest = std::max(tallest, height);
    }
    y += kPanelHeader + tallest + kAxisHeight + kRowGap;
  }
  return y;
}

}  // namespace

std::string to_svg(const std::vector<ScheduleMap>& maps, const SvgOptions& options) {
  SvgCanvas canvas;
  double y = kMargin;
  if (!options.title.empty()) {
    canvas.text({kMargin, y + 16.0}, options.title, {.size_px = 20.0, .fill = kInk, .bold = true});
    y += 28.0;
  }
  if (!maps.empty()) {
    const ScheduleMap& map = maps.front();
    canvas.text({kMargin, y + 12.0}, words::batch_words(map) + "; bars in LeanTiles, a row a worker", {.size_px = 13.0});
    y += 40.0;
    if (map.shape.batch > 1) {
      constexpr double kHeight = 56.0;
      paint_lengths(canvas, map, {kMargin, y + 6.0, options.width_px - 2.0 * kMargin, kHeight});
      y += kHeight + 46.0;
    }
    y = paint_panels(canvas, maps, options, y);
    paint_legend(canvas, map, {kMargin, y - 6.0});
    y += 18.0;
  }
  return canvas.document(options.width_px, y + kMargin * 0.6, options.title.empty() ? "schedule" : options.title);
}

}  // namespace lean::explain
