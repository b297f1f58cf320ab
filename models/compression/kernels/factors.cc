// PowerSGD's products of a long matrix and a thin one. See models/compression/codecs/powersgd.py.
#include <algorithm>
#include <cmath>

#include "op.h"

namespace groundswell {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTogether = 4;  // columns of a factor per pass over a row of the matrix
// A column that becomes shorter than this in orthogonalisation was a combination of the others, up to rounding.
constexpr double kRelativeZero = 1e-5;

// Returns a factor `(count, rank)` as `rank` rows, with zero rows up to a multiple of kTogether.
std::vector<float> transposed(const float* factor, int64_t count, int64_t rank) {
  std::vector<float> rows((rank + kTogether - 1) / kTogether * kTogether * count);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < rank; ++k) rows[k * count + i] = factor[i * rank + k];
  }
  return rows;
}

GROUNDSWELL_FAST int32_t correct_row(const float* __restrict gradient, const float* __restrict residual, float scale,
                                     float* __restrict row, int64_t columns) {
  return correct(gradient, residual, scale, row, columns);
}

// Computes the products of one row with kTogether rows of a factor.
GROUNDSWELL_FAST void dot_row(const float* __restrict row, const float* __restrict factor, int64_t columns,
                              float* __restrict products) {
  float sums[kTogether][kLanes] = {};
  const int64_t whole = columns / kLanes * kLanes;
  for (int64_t start = 0; start < whole; start += kLanes) {
    for (int64_t k = 0; k < kTogether; ++k) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        sums[k][lane] += row[start + lane] * factor[k * columns + start + lane];
      }
    }
  }
  for (int64_t k = 0; k < kTogether; ++k) {
    float total = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) total += sums[k][lane];
    for (int64_t column = whole; column < columns; ++column) total += row[column] * factor[k * columns + column];
    products[k] = total;
  }
}

// Adds the row, times one weight each, to kTogether rows of sums.
GROUNDSWELL_FAST void accumulate_row(const float* __restrict row, const float* __restrict weights, float* __restrict sums,
                              int64_t columns) {
  const float a = weights[0], b = weights[1], c = weights[2], d = weights[3];
  float* __restrict first = sums;
  float* __restrict second = sums + columns;
  float* __restrict third = sums + 2 * columns;
  float* __restrict fourth = sums + 3 * columns;
  for (int64_t column = 0; column < columns; ++column) {
    const float value = row[column];
    first[column] += a * value;
    second[column] += b * value;
    third[column] += c * value;
    fourth[column] += d * value;
  }
}

// Adds kTogether columns of the product of two factors to one row: target += sign * product, or = where it is first.
GROUNDSWELL_FAST void expand_row(const float* __restrict weights, const float* __restrict factor, int64_t columns,
                                 float sign, float* __restrict target, bool first) {
  const float a = sign * weights[0], b = sign * weights[1], c = sign * weights[2], d = sign * weights[3];
  const float* __restrict one = factor;
  const float* __restrict two = factor + columns;
  const float* __restrict three = factor + 2 * columns;
  const float* __restrict four = factor + 3 * columns;
  if (first) {
    for (int64_t column = 0; column < columns; ++column) {
      target[column] = (a * one[column] + b * two[column]) + (c * three[column] + d * four[column]);
    }
  } else {
    for (int64_t column = 0; column < columns; ++column) {
      target[column] += (a * one[column] + b * two[column]) + (c * three[column] + d * four[column]);
    }
  }
}

// Reads up to kTogether entries of a row of a factor; missing ones are 0.
void read_weights(const float* row, int64_t start, int64_t rank, float* weights) {
  for (int64_t k = 0; k < kTogether; ++k) weights[k] = start + k < rank ? row[start + k] : 0.0f;
}

// Computes matrix = gradient + scale * residual and its product with a factor `(columns, rank)`. An empty residual means
// zeros.
void project(Call& call) {
  auto gradient = call.input<float>(0);
  auto residual = call.input<float>(1);
  float scale = call.scalar<float>(2);
  auto factor = call.input<float>(3);
  const int64_t columns = factor.axes(2)[0], rank = factor.axes(2)[1];
  if (columns == 0 || gradient.size() % columns != 0) throw std::invalid_argument("a factor for other columns");
  if (residual.size() == 0) {
    residual = gradient;
    scale = 0;
  }
  if (residual.size() != gradient.size()) throw std::invalid_argument("the residual has another shape");
  const int64_t rows = gradient.size() / columns;
  float* matrix = call.output<float>(0, {rows, columns});
  float* products = call.output<float>(1, {rows, rank});
  const std::vector<float> thin = transposed(factor.data, columns, rank);
  bool finite = true;
  for (int64_t row = 0; row < rows; ++row) {
    float* values = matrix + row * columns;
    const int32_t largest =
        correct_row(gradient.data + row * columns, residual.data + row * columns, scale, values, columns);
    finite &= largest < kInfinite;
    for (int64_t start = 0; start < rank; start += kTogether) {
      float four[kTogether];
      dot_row(values, thin.data() + start * columns, columns, four);
      for (int64_t k = start; k < std::min(rank, start + kTogether); ++k) products[row * rank + k] = four[k - start];
    }
  }
  *call.output<bool>(2, {}) = finite;
}

double norm(const std::vector<double>& column) {
  double squares = 0;
  for (double value : column) squares += value * value;
  return std::sqrt(squares);
}

// Replaces columns by orthonormal ones with the same span, by Gram-Schmidt, twice; dependent columns become zero.
void orthonormalise(std::vector<std::vector<double>>& columns) {
  for (size_t k = 0; k < columns.size(); ++k) {
    auto& column = columns[k];
    const double before = norm(column);
    for (double& value : column) value = before > 0 ? value / before : 0.0;
    for (int round = 0; round < 2; ++round) {
      for (size_t other = 0; other < k; ++other) {
        double product = 0;
        for (size_t i = 0; i < column.size(); ++i) product += columns[other][i] * column[i];
        for (size_t i = 0; i < column.size(); ++i) column[i] -= product * columns[other][i];
      }
    }
    const double after = norm(column);
    for (double& value : column) value = after > kRelativeZero ? value / after : 0.0;
  }
}

// Computes basis, the orthonormal columns of `products`; own = transposed matrix * basis; and
// remainder = matrix - basis * transposed own.
void improve(Call& call) {
  auto matrix = call.input<float>(0);
  auto products = call.input<float>(1);
  const int64_t rows = products.axes(2)[0], rank = products.axes(2)[1], columns = matrix.axes(2)[1];
  if (matrix.lengths[0] != rows) throw std::invalid_argument("a factor for other rows");
  std::vector<std::vector<double>> wide(rank, std::vector<double>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < rank; ++k) wide[k][i] = products.data[i * rank + k];
  }
  orthonormalise(wide);
  float* basis = call.output<float>(0, {rows, rank});
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < rank; ++k) basis[i * rank + k] = static_cast<float>(wide[k][i]);
  }
  float* own = call.output<float>(1, {columns, rank});
  std::vector<float> sums((rank + kTogether - 1) / kTogether * kTogether * columns);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < rank; start += kTogether) {
      float weights[kTogether];
      read_weights(basis + row * rank, start, rank, weights);
      accumulate_row(matrix.data + row * columns, weights, sums.data() + start * columns, columns);
    }
  }
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t k = 0; k < rank; ++k) own[column * rank + k] = sums[k * columns + column];
  }
  float* remainder = call.output_over(0, 2, {rows, columns});
  for (int64_t row = 0; row < rows; ++row) {
    float* values = remainder + row * columns;
    if (remainder != matrix.data) std::copy_n(matrix.data + row * columns, columns, values);
    for (int64_t start = 0; start < rank; start += kTogether) {
      float weights[kTogether];
      read_weights(basis + row * rank, start, rank, weights);
      expand_row(weights, sums.data() + start * columns, columns, -1.0f, values, false);
    }
  }
}

// Computes the product of `(rows, rank)` and the transposed `(columns, rank)`.
void expand(Call& call) {
  auto left = call.input<float>(0);
  auto right = call.input<float>(1);
  const int64_t rows = left.axes(2)[0], rank = left.axes(2)[1], columns = right.axes(2)[0];
  if (right.lengths[1] != rank || rank == 0) throw std::invalid_argument("factors of different ranks");
  float* matrix = call.output<float>(0, {rows, columns});
  const std::vector<float> thin = transposed(right.data, columns, rank);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < rank; start += kTogether) {
      float weights[kTogether];
      read_weights(left.data + row * rank, start, rank, weights);
      expand_row(weights, thin.data() + start * columns, columns, 1.0f, matrix + row * columns, start == 0);
    }
  }
}

const bool made[] = {
    make_operation<project>("GroundswellProject",
                            {"gradient: float", "residual: float", "scale: float", "factor: float"},
                            {"matrix: float", "products: float", "finite: bool"}),
    make_operation<improve>("GroundswellImprove", {"matrix: float", "products: float"},
                            {"basis: float", "own: float", "remainder: float"}),
    make_operation<expand>("GroundswellExpand", {"left: float", "right: float"}, {"matrix: float"}),
};

}  // namespace
}  // namespace groundswell
