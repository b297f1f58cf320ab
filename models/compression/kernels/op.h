// TensorFlow operations in C++ through TensorFlow's C interface, which does not change between versions. No TensorFlow
// header is needed to build them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <stdexcept>
#include <vector>

// Compiles a function for three kinds of processor, from which the loader chooses. Results are equal bit for bit on
// all: the compiler may neither reorder sums nor fuse products with them (-ffp-contract=off).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(GROUNDSWELL_ONE_TARGET)
#define GROUNDSWELL_FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GROUNDSWELL_FAST
#endif

#ifdef GROUNDSWELL_TF_HEADERS  // a test compares the declarations below with TensorFlow's
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_datatype.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"
#else
typedef enum TF_DataType : unsigned { TF_FLOAT = 1, TF_INT32 = 3, TF_UINT8 = 4, TF_BOOL = 10 } TF_DataType;
typedef enum TF_Code : unsigned { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8 } TF_Code;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_Status;
struct TF_Tensor;
#endif

extern "C" {
TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status* status, TF_Code code, const char* message);
TF_Code TF_GetCode(const TF_Status*);
const char* TF_Message(const TF_Status*);
TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char* specification);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char* specification);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(
    TF_OpDefinitionBuilder*, void (*function)(TF_ShapeInferenceContext*, TF_Status*));
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);
TF_KernelBuilder* TF_NewKernelBuilder(
    const char* operation, const char* device, void* (*create)(TF_OpKernelConstruction*),
    void (*compute)(void*, TF_OpKernelContext*), void (*remove)(void*));
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);
void TF_GetInput(TF_OpKernelContext*, int number, TF_Tensor** tensor, TF_Status*);
TF_Tensor* TF_AllocateOutput(
    TF_OpKernelContext*, int number, TF_DataType type, const int64_t* lengths, int axes, size_t bytes, TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(
    TF_OpKernelContext*, const int* candidates, int count, int number, const int64_t* lengths, int axes,
    int* forwarded, TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);
void TF_DeleteTensor(TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int axis);
void* TF_TensorData(const TF_Tensor*);
TF_DataType TF_TensorType(const TF_Tensor*);
}

namespace groundswell {

template <typename T>
constexpr TF_DataType data_type();
template <>
constexpr TF_DataType data_type<float>() { return TF_FLOAT; }
template <>
constexpr TF_DataType data_type<int32_t>() { return TF_INT32; }
template <>
constexpr TF_DataType data_type<uint8_t>() { return TF_UINT8; }
template <>
constexpr TF_DataType data_type<bool>() { return TF_BOOL; }

using Lengths = std::vector<int64_t>;

inline int64_t product(const Lengths& lengths) {
  int64_t elements = 1;
  for (int64_t length : lengths) elements *= length;
  return elements;
}

template <typename T>
struct Array {
  T* data;
  Lengths lengths;

  int64_t size() const { return product(lengths); }

  // Returns the lengths; throws if there are not `count` of them.
  const Lengths& axes(size_t count) const {
    if (lengths.size() != count) throw std::invalid_argument("a tensor with another number of axes");
    return lengths;
  }
};

// An error of TensorFlow; the status describes it.
struct TensorflowError : std::exception {};

// One call of an operation. It owns the inputs and outputs.
class Call {
 public:
  Call(TF_OpKernelContext* context, TF_Status* status) : context_(context), status_(status) {}
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  ~Call() {
    for (TF_Tensor* tensor : inputs_) release(tensor);
    for (TF_Tensor* tensor : outputs_) release(tensor);
  }

  template <typename T>
  Array<const T> input(int number) {
    TF_GetInput(context_, number, &inputs_[number], status_);
    check();
    TF_Tensor* tensor = inputs_[number];
    if (TF_TensorType(tensor) != data_type<T>()) throw std::invalid_argument("input of another type");
    Lengths lengths;
    for (int axis = 0; axis < TF_NumDims(tensor); ++axis) lengths.push_back(TF_Dim(tensor, axis));
    return {static_cast<const T*>(TF_TensorData(tensor)), lengths};
  }

  template <typename T>
  T scalar(int number) {
    auto value = input<T>(number);
    if (value.size() != 1) throw std::invalid_argument("a scalar has another shape");
    return value.data[0];
  }

  // Returns a number of parts, rows, columns or elements, at least 1.
  int64_t count(int number) {
    int64_t value = scalar<int32_t>(number);
    if (value < 1) throw std::invalid_argument("a number below 1");
    return value;
  }

  template <typename T>
  T* output(int number, const Lengths& lengths) {
    outputs_[number] = TF_AllocateOutput(context_, number, data_type<T>(), lengths.data(),
                                         static_cast<int>(lengths.size()), sizeof(T) * product(lengths), status_);
    check();
    return static_cast<T*>(TF_TensorData(outputs_[number]));
  }

  // Allocates an output in the memory of an input, if nothing else uses that memory.
  float* output_over(int input, int number, const Lengths& lengths) {
    // Memory is reused only without a second reference. TensorFlow's own reference keeps it until the call ends.
    release(inputs_[input]);
    inputs_[input] = nullptr;
    int forwarded = -1;
    outputs_[number] = TF_ForwardInputOrAllocateOutput(context_, &input, 1, number, lengths.data(),
                                                       static_cast<int>(lengths.size()), &forwarded, status_);
    check();
    return static_cast<float*>(TF_TensorData(outputs_[number]));
  }

 private:
  static constexpr size_t kMost = 8;

  static void release(TF_Tensor* tensor) {
    if (tensor != nullptr) TF_DeleteTensor(tensor);
  }

  void check() const {
    if (TF_GetCode(status_) != TF_OK) throw TensorflowError();
  }

  TF_OpKernelContext* context_;
  TF_Status* status_;
  TF_Tensor* inputs_[kMost] = {};
  TF_Tensor* outputs_[kMost] = {};
};

template <void (*body)(Call&)>
void compute(void*, TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  try {
    Call call(context, status);
    body(call);
  } catch (const TensorflowError&) {
  } catch (const std::bad_alloc&) {
    TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, "out of memory");
  } catch (const std::exception& error) {
    TF_SetStatus(status, TF_INVALID_ARGUMENT, error.what());
  }
  if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
  TF_DeleteStatus(status);
}

// Prefetches values while earlier ones are processed: one core then reads memory twice as fast.
inline void fetch_ahead(const float* values, int64_t length) {
  constexpr int64_t kAhead = 2048, kLine = 16;
  for (int64_t i = 0; i < length; i += kLine) __builtin_prefetch(values + kAhead + i);
}

// The bits of infinity. Finite magnitudes have smaller bits, NaN has larger ones.
constexpr int32_t kInfinite = 0x7f800000;

// Computes corrected = gradient + scale * residual. Returns the bits of the largest magnitude; bits order as magnitudes
// do.
inline int32_t correct(const float* __restrict gradient, const float* __restrict residual, float scale,
                       float* __restrict corrected, int64_t length) {
  int32_t largest = 0;
  fetch_ahead(gradient, length);
  fetch_ahead(residual, length);
  for (int64_t i = 0; i < length; ++i) {
    const float value = gradient[i] + scale * residual[i];
    corrected[i] = value;
    int32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Registers `body` as an operation on CPUs. Inputs and outputs are written as in TensorFlow, "name: float".
template <void (*body)(Call&)>
bool make_operation(const char* name, std::initializer_list<const char*> inputs,
                    std::initializer_list<const char*> outputs) {
  TF_Status* status = TF_NewStatus();
  TF_OpDefinitionBuilder* definition = TF_NewOpDefinitionBuilder(name);
  for (const char* input : inputs) TF_OpDefinitionBuilderAddInput(definition, input);
  for (const char* output : outputs) TF_OpDefinitionBuilderAddOutput(definition, output);
  TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, TF_ShapeInferenceContextSetUnknownShape);
  TF_RegisterOpDefinition(definition, status);
  if (TF_GetCode(status) == TF_OK) {
    TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, "CPU", nullptr, &compute<body>, nullptr), status);
  }
  bool made = TF_GetCode(status) == TF_OK;
  TF_DeleteStatus(status);
  return made;
}

}  // namespace groundswell
