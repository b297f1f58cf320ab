// 1-bit SGD: a sign per element and two means per column. The messages are those of
// models/compression/codecs/onebit.py.
#include <algorithm>
#include <cmath>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "op.h"

namespace groundswell {
namespace {

// Number of rows that are summed in float32 before the sums are added to float64 sums of the columns.
constexpr int64_t kTogether = 16;

// Number of columns whose results stay in the first-level cache until they are written.
constexpr int64_t kBlock = 256;

// Writes without reading the target's old content into the cache first: that would cost more than the computation, and
// a long result is read much later.
inline void write_past_cache(const float* values, float* target, int64_t length) {
  int64_t i = 0;
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0) {
    for (; i + 4 <= length; i += 4) _mm_stream_ps(target + i, _mm_load_ps(values + i));
  }
#endif
  for (; i < length; ++i) target[i] = values[i];
}

// Makes what was written past the cache visible to other threads.
inline void finish_writes() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// Sums and counts of columns over the rows so far.
struct Columns {
  explicit Columns(int64_t width) : above(width), below(width), count(width), positive(width), negative(width) {}

  std::vector<float> above, below;  // sums over the last rows
  std::vector<int32_t> count;       // number of elements that are not negative
  std::vector<double> positive, negative;
};

// Adds one row of gradient + scale * residual to the sums, and writes its signs into one bit of each byte.
GROUNDSWELL_FAST void encode_row(const float* __restrict gradient, const float* __restrict residual, float scale,
                                 float share, uint8_t* __restrict bits, int bit, float* __restrict above,
                                 float* __restrict below, int64_t width) {
  float values[kBlock];
  const uint8_t mask = static_cast<uint8_t>(1 << bit);
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t length = std::min(kBlock, width - start);
    fetch_ahead(gradient + start, length);
    fetch_ahead(residual + start, length);
    for (int64_t i = 0; i < length; ++i) {
      const float value = gradient[start + i] + scale * residual[start + i];
      const float part = value * share;
      values[i] = value;
      above[start + i] += 0.0f > part ? 0.0f : part;  // keeps NaN
      below[start + i] += 0.0f < part ? 0.0f : part;
    }
    for (int64_t i = 0; i < length; ++i) bits[start + i] |= values[i] >= 0 ? mask : 0;
  }
}

GROUNDSWELL_FAST void count_bits(const uint8_t* __restrict bits, int32_t* __restrict count, int64_t width) {
  for (int64_t column = 0; column < width; ++column) {
    uint32_t byte = bits[column];
    byte -= byte >> 1 & 0x55;
    byte = (byte & 0x33) + (byte >> 2 & 0x33);
    count[column] += (byte + (byte >> 4)) & 0x0f;
  }
}

GROUNDSWELL_FAST void add_sums(float* __restrict sums, double* __restrict totals, int64_t width) {
  for (int64_t column = 0; column < width; ++column) {
    totals[column] += sums[column];
    sums[column] = 0;
  }
}

// Computes the remainder of one row: gradient + scale * residual minus the means. The sum is computed again, because
// reading both inputs twice costs less than writing the sum and changing it.
GROUNDSWELL_FAST void subtract_row(const float* __restrict gradient, const float* __restrict residual, float scale,
                                   const float* __restrict upper, const float* __restrict lower,
                                   float* __restrict remainder, int64_t width) {
  alignas(64) float values[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t length = std::min(kBlock, width - start);
    fetch_ahead(gradient + start, length);
    fetch_ahead(residual + start, length);
    for (int64_t i = 0; i < length; ++i) {
      const float value = gradient[start + i] + scale * residual[start + i];
      const float over = upper[start + i], under = lower[start + i];
      values[i] = value - (value >= 0 ? over : under);
    }
    write_past_cache(values, remainder + start, length);
  }
}

GROUNDSWELL_FAST void decode_row(const uint8_t* __restrict bits, int mask, const float* __restrict upper,
                                 const float* __restrict lower, float* __restrict row, int64_t width) {
  alignas(64) float values[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t length = std::min(kBlock, width - start);
    for (int64_t i = 0; i < length; ++i) {
      const float over = upper[start + i], under = lower[start + i];
      values[i] = (bits[start + i] & mask) != 0 ? over : under;
    }
    write_past_cache(values, row + start, length);
  }
}

GROUNDSWELL_FAST void add_row(const uint8_t* __restrict bits, int mask, const float* __restrict upper,
                              const float* __restrict lower, float* __restrict values, int64_t width) {
  for (int64_t column = 0; column < width; ++column) {
    const float above = upper[column], below = lower[column];
    values[column] += (bits[column] & mask) != 0 ? above : below;
  }
}

// Computes the message and the remainder of gradient + scale * residual, whose columns are cut into parts. An empty
// residual means zeros.
void encode(Call& call) {
  auto gradient = call.input<float>(0);
  auto residual = call.input<float>(1);
  float scale = call.scalar<float>(2);
  const int64_t parts = call.count(3);
  if (gradient.lengths.size() < 2 || gradient.size() == 0) throw std::invalid_argument("no matrix");
  if (residual.size() == 0) {
    residual = gradient;
    scale = 0;
  }
  if (residual.size() != gradient.size()) throw std::invalid_argument("the residual has another shape");
  const int64_t columns = gradient.lengths.back(), rows = gradient.size() / columns;
  const int64_t width = (columns + parts - 1) / parts, byte_rows = (rows + 7) / 8;
  uint8_t* bits = call.output<uint8_t>(0, {parts, byte_rows, width});
  float* upper = call.output<float>(1, {parts, 1, width});
  float* lower = call.output<float>(2, {parts, 1, width});
  float* remainder = call.output<float>(3, gradient.lengths);
  std::memset(bits, 0, parts * byte_rows * width);
  std::fill(upper, upper + parts * width, 0.0f);
  std::fill(lower, lower + parts * width, 0.0f);
  // Scaled before the sum, which could leave float32's range.
  const float share = 1.0f / static_cast<float>(rows);
  Columns seen(columns);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t first = 0, part = 0; first < columns; first += width, ++part) {
      const int64_t place = row * columns + first;
      encode_row(gradient.data + place, residual.data + place, scale, share,
                 bits + (part * byte_rows + row % byte_rows) * width, static_cast<int>(row / byte_rows),
                 seen.above.data() + first, seen.below.data() + first, std::min(width, columns - first));
    }
    if (row % kTogether == kTogether - 1 || row == rows - 1) {
      add_sums(seen.above.data(), seen.positive.data(), columns);
      add_sums(seen.below.data(), seen.negative.data(), columns);
    }
  }
  for (int64_t row = 0; row < byte_rows; ++row) {
    for (int64_t first = 0, part = 0; first < columns; first += width, ++part) {
      count_bits(bits + (part * byte_rows + row) * width, seen.count.data() + first, std::min(width, columns - first));
    }
  }
  bool finite = true;
  for (int64_t column = 0; column < columns; ++column) {
    const double plus = seen.count[column], minus = static_cast<double>(rows) - plus;
    upper[column] = static_cast<float>(seen.positive[column] * (rows / std::max(plus, 1.0)));
    lower[column] = static_cast<float>(seen.negative[column] * (rows / std::max(minus, 1.0)));
    finite &= std::isfinite(upper[column]) && std::isfinite(lower[column]);
  }
  *call.output<bool>(4, {}) = finite;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = row * columns;
    subtract_row(gradient.data + place, residual.data + place, scale, upper, lower, remainder + place, columns);
  }
  finish_writes();
}

struct Message {
  Array<const uint8_t> bits;
  Array<const float> upper, lower;
  int64_t parts, byte_rows, width;
};

Message message(Call& call, int64_t rows) {
  Message read{call.input<uint8_t>(0), call.input<float>(1), call.input<float>(2), 0, 0, 0};
  const Lengths& axes = read.bits.axes(3);
  read.parts = axes[0];
  read.byte_rows = axes[1];
  read.width = axes[2];
  const int64_t means = read.parts * read.width;
  if (read.byte_rows != (rows + 7) / 8 || read.upper.size() != means || read.lower.size() != means) {
    throw std::invalid_argument("a message for other rows");
  }
  return read;
}

// Computes the whole matrix from the messages of all parts.
void decode(Call& call) {
  const int64_t rows = call.count(3), columns = call.count(4);
  const Message read = message(call, rows);
  if (read.parts * read.width < columns) throw std::invalid_argument("a message for fewer columns");
  float* values = call.output<float>(0, {rows, columns});
  for (int64_t row = 0; row < rows; ++row) {
    const int mask = 1 << (row / read.byte_rows);
    for (int64_t part = 0, first = 0; first < columns; ++part, first += read.width) {
      const int64_t width = std::min(columns - first, read.width);
      const uint8_t* bits = read.bits.data + (part * read.byte_rows + row % read.byte_rows) * read.width;
      decode_row(bits, mask, read.upper.data + first, read.lower.data + first, values + row * columns + first, width);
    }
  }
  finish_writes();
}

// Computes the mean of all messages, one per rank, of the same part.
void mean(Call& call) {
  const int64_t rows = call.count(3);
  const Message read = message(call, rows);
  float* values = call.output<float>(0, {rows, read.width});
  const float share = 1.0f / static_cast<float>(read.parts);
  for (int64_t row = 0; row < rows; ++row) {
    float* sums = values + row * read.width;
    std::fill(sums, sums + read.width, 0.0f);
    const int mask = 1 << (row / read.byte_rows);
    for (int64_t rank = 0; rank < read.parts; ++rank) {
      const uint8_t* bits = read.bits.data + (rank * read.byte_rows + row % read.byte_rows) * read.width;
      add_row(bits, mask, read.upper.data + rank * read.width, read.lower.data + rank * read.width, sums, read.width);
    }
    for (int64_t column = 0; column < read.width; ++column) sums[column] *= share;
  }
}

const bool made[] = {
    make_operation<encode>("GroundswellEncodeColumns",
                           {"gradient: float", "residual: float", "scale: float", "parts: int32"},
                           {"bits: uint8", "upper: float", "lower: float", "remainder: float", "finite: bool"}),
    make_operation<decode>("GroundswellDecodeColumns",
                           {"bits: uint8", "upper: float", "lower: float", "rows: int32", "columns: int32"},
                           {"values: float"}),
    make_operation<mean>("GroundswellMeanColumns", {"bits: uint8", "upper: float", "lower: float", "rows: int32"},
                         {"values: float"}),
};

}  // namespace
}  // namespace groundswell
