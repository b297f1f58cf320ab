// The largest elements by place and value. The messages are those of models/compression/codecs/topk.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "op.h"

namespace groundswell {
namespace {

// The sample has one of this many elements. Odd: it shares no factor with the usual widths of layers.
constexpr int64_t kStride = 61;
constexpr int64_t kSampled = 64 * kStride;  // shorter parts are compared without a sample
constexpr int64_t kRun = 64;

inline uint32_t magnitude(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffu;
}

// A key that orders by magnitude, and equal magnitudes by place: the first has the larger key.
inline uint64_t rank_key(uint32_t size, int64_t place) {
  return static_cast<uint64_t>(size) << 32 | (0xffffffffu - static_cast<uint32_t>(place));
}

inline int32_t place_of(uint64_t key) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key)); }

// Corrects a part; writes the starts of the runs with an element that reaches the bound, and returns their number.
GROUNDSWELL_FAST int64_t correct_runs(const float* __restrict gradient, const float* __restrict residual, float scale,
                                      float* __restrict corrected, int64_t elements, uint32_t bound,
                                      int64_t* __restrict runs) {
  int64_t found = 0;
  for (int64_t start = 0; start < elements; start += kRun) {
    const int64_t length = std::min(kRun, elements - start);
    const int32_t most = correct(gradient + start, residual + start, scale, corrected + start, length);
    runs[found] = start;
    found += static_cast<uint32_t>(most) >= bound ? 1 : 0;
  }
  return found;
}

class Selector {
 public:
  // Writes places, in rising order, and values of the `count` largest of a part of `elements`. Those from `real` on are
  // zeros that are not in memory. Writes the corrected values without the selected ones into `remainder`. Returns
  // whether all are finite.
  bool select(const float* gradient, const float* residual, float scale, float* remainder, int64_t real,
              int64_t elements, int64_t count, int32_t* places, float* values) {
    uint32_t bound = lower_bound(gradient, residual, scale, real, count);
    runs_.resize(real / kRun + 2);
    const int64_t found = correct_runs(gradient, residual, scale, remainder, real, bound, runs_.data());
    keys_.clear();
    for (int64_t run = 0; run < found; ++run) {
      collect(remainder, runs_[run], std::min(real, runs_[run] + kRun), bound);
    }
    if (static_cast<int64_t>(keys_.size()) < count && bound > 1) {  // the sample was not representative
      keys_.clear();
      collect(remainder, 0, real, 1);
    }
    if (static_cast<int64_t>(keys_.size()) > count) {
      std::nth_element(keys_.begin(), keys_.begin() + (count - 1), keys_.end(), std::greater<uint64_t>());
      keys_.resize(count);
    }
    chosen_.clear();
    uint64_t largest = 0;
    for (uint64_t key : keys_) {
      chosen_.push_back(place_of(key));
      largest = std::max(largest, key);
    }
    std::sort(chosen_.begin(), chosen_.end());
    add_zeros(elements, count);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t place = chosen_[i];
      places[i] = place;
      values[i] = place < real ? remainder[place] : 0.0f;
      if (place < real) remainder[place] = 0.0f;
    }
    return static_cast<int32_t>(largest >> 32) < kInfinite;
  }

 private:
  // Returns a bound that very likely a few more than `count` elements reach; at least the smallest number above 0.
  uint32_t lower_bound(const float* gradient, const float* residual, float scale, int64_t real, int64_t count) {
    if (real < kSampled) return 1;
    sample_.clear();
    for (int64_t place = 0; place < real; place += kStride) {
      sample_.push_back(magnitude(gradient[place] + scale * residual[place]));
    }
    // Lower by four standard deviations of the sample.
    const double share = static_cast<double>(count) / kStride;
    const int64_t place = static_cast<int64_t>(share + 4 * std::sqrt(share) + 4);
    if (place >= static_cast<int64_t>(sample_.size())) return 1;
    std::nth_element(sample_.begin(), sample_.begin() + place, sample_.end(), std::greater<uint32_t>());
    return std::max(sample_[place], 1u);
  }

  void collect(const float* values, int64_t start, int64_t end, uint32_t bound) {
    for (int64_t place = start; place < end; ++place) {
      const uint32_t size = magnitude(values[place]);
      if (size >= bound) keys_.push_back(rank_key(size, place));
    }
  }

  // Adds the first zeros if fewer than `count` elements are not zero.
  void add_zeros(int64_t elements, int64_t count) {
    const size_t others = chosen_.size();
    size_t next = 0;
    for (int64_t place = 0; place < elements && static_cast<int64_t>(chosen_.size()) < count; ++place) {
      if (next < others && chosen_[next] == place) {
        ++next;
      } else {
        chosen_.push_back(static_cast<int32_t>(place));
      }
    }
    if (chosen_.size() > others) std::sort(chosen_.begin(), chosen_.end());
  }

  std::vector<uint32_t> sample_;
  std::vector<int64_t> runs_;
  std::vector<uint64_t> keys_;
  std::vector<int32_t> chosen_;
};

// Selects the largest elements of each part of gradient + scale * residual, flat, and computes the remainder. An empty
// residual means zeros.
void encode(Call& call) {
  auto gradient = call.input<float>(0);
  auto residual = call.input<float>(1);
  float scale = call.scalar<float>(2);
  const int64_t parts = call.count(3), elements = call.count(4), count = call.count(5);
  if (residual.size() == 0) {
    residual = gradient;
    scale = 0;
  }
  const int64_t total = gradient.size();
  if (residual.size() != total) throw std::invalid_argument("the residual has another shape");
  if (parts * elements < total || count > elements) throw std::invalid_argument("parts that are too short");
  int32_t* places = call.output<int32_t>(0, {parts, count});
  float* values = call.output<float>(1, {parts, count});
  float* remainder = call.output<float>(2, gradient.lengths);
  Selector selector;
  bool finite = true;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = std::min(part * elements, total), real = std::min(elements, total - first);
    finite &= selector.select(gradient.data + first, residual.data + first, scale, remainder + first, real, elements, count,
                              places + part * count, values + part * count);
  }
  *call.output<bool>(3, {}) = finite;
}

struct Message {
  Array<const int32_t> places;
  Array<const float> values;
  int64_t rows, count;
};

Message message(Call& call, int64_t elements) {
  Message read{call.input<int32_t>(0), call.input<float>(1), 0, 0};
  const Lengths& axes = read.places.axes(2);
  read.rows = axes[0];
  read.count = axes[1];
  if (read.values.size() != read.places.size()) throw std::invalid_argument("places and values differ in number");
  // Checked, because they come from another process.
  for (int64_t i = 0; i < read.places.size(); ++i) {
    if (read.places.data[i] < 0 || read.places.data[i] >= elements) throw std::invalid_argument("a place out of range");
  }
  return read;
}

// Computes the first `total` elements of the concatenated parts.
void decode(Call& call) {
  const int64_t elements = call.count(2), total = call.count(3);
  const Message read = message(call, elements);
  if (read.rows * elements < total) throw std::invalid_argument("messages of too few parts");
  float* joined = call.output<float>(0, {total});
  std::memset(joined, 0, total * sizeof(float));
  for (int64_t i = 0; i < read.rows * read.count; ++i) {
    const int64_t place = i / read.count * elements + read.places.data[i];
    // Added, because messages are filled up by repeating a place with the value 0.
    if (place < total) joined[place] += read.values.data[i];
  }
}

// Computes the mean of all messages, one per rank, of the same part.
void mean(Call& call) {
  const int64_t elements = call.count(2);
  const Message read = message(call, elements);
  float* sums = call.output<float>(0, {elements});
  std::memset(sums, 0, elements * sizeof(float));
  for (int64_t i = 0; i < read.rows * read.count; ++i) sums[read.places.data[i]] += read.values.data[i];
  const float share = 1.0f / static_cast<float>(read.rows);
  for (int64_t place = 0; place < elements; ++place) sums[place] *= share;
}

// Returns `values`, flat, with zeros at the places of a message of all parts.
void clear(Call& call) {
  auto values = call.input<float>(0);
  auto places = call.input<int32_t>(1);
  const int64_t elements = call.count(2), total = values.size(), count = places.axes(2)[1];
  float* cleared = call.output_over(0, 0, values.lengths);
  if (cleared != values.data) std::copy_n(values.data, total, cleared);
  for (int64_t i = 0; i < places.size(); ++i) {
    const int64_t place = i / count * elements + places.data[i];
    if (place >= 0 && place < total) cleared[place] = 0.0f;
  }
}

const bool made[] = {
    make_operation<encode>("GroundswellEncodeLargest",
                           {"gradient: float", "residual: float", "scale: float", "parts: int32", "elements: int32",
                            "count: int32"},
                           {"places: int32", "values: float", "remainder: float", "finite: bool"}),
    make_operation<decode>("GroundswellDecodeLargest",
                           {"places: int32", "values: float", "elements: int32", "total: int32"}, {"joined: float"}),
    make_operation<mean>("GroundswellMeanLargest", {"places: int32", "values: float", "elements: int32"},
                         {"sums: float"}),
    make_operation<clear>("GroundswellClear", {"values: float", "places: int32", "elements: int32"},
                          {"cleared: float"}),
};

}  // namespace
}  // namespace groundswell
