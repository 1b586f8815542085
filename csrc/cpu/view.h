// A tensor of Python, read through its attributes: nothing here is linked against torch.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "convert.h"
#include "problem.h"

namespace specattn {

// What a tensor is asked for; loaded with the module, and never given back.
struct TorchNames {
  PyObject *dtype, *shape, *stride, *data_ptr;
  PyObject* dtypes[kDtypes];  // by Dtype

  void load() {
    const auto torch = pybind11::module_::import("torch");
    dtype = PyUnicode_InternFromString("dtype");
    shape = PyUnicode_InternFromString("shape");
    stride = PyUnicode_InternFromString("stride");
    data_ptr = PyUnicode_InternFromString("data_ptr");
    for (int i = 0; i < kDtypes; ++i) {
      dtypes[i] = pybind11::object(torch.attr(kDtypeNames[i])).release().ptr();
    }
  }
};
inline TorchNames torch_names = {};

struct View {
  const char* name = "";
  void* data = nullptr;
  int dims = 0;
  int64_t shape[6] = {}, stride[6] = {};
  Dtype dtype = Dtype::kFloat32;

  // None gives a view without data.
  View(const char* name, pybind11::handle tensor, bool strided = false) : name(name) {
    using pybind11::object;
    if (tensor.is_none()) return;
    const TorchNames& torch = torch_names;
    PyObject* const from = tensor.ptr();
    const object type = taken(PyObject_GetAttr(from, torch.dtype));
    const object sizes = taken(PyObject_GetAttr(from, torch.shape));
    const object steps = taken(PyObject_CallMethodNoArgs(from, torch.stride));
    const object address = taken(PyObject_CallMethodNoArgs(from, torch.data_ptr));
    int known = 0;
    while (known < kDtypes && torch.dtypes[known] != type.ptr()) ++known;
    if (known == kDtypes) fail("has the unknown type " + std::string(pybind11::str(type)));
    if (!PyTuple_Check(sizes.ptr()) || !PyTuple_Check(steps.ptr()) ||
        PyTuple_GET_SIZE(sizes.ptr()) > 6) {
      fail("has no plain shape and strides");
    }
    data = PyLong_AsVoidPtr(address.ptr());
    dtype = static_cast<Dtype>(known);
    dims = static_cast<int>(PyTuple_GET_SIZE(sizes.ptr()));
    for (int i = 0; i < dims; ++i) {
      shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
      stride[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(steps.ptr(), i));
    }
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    if (!strided && dims > 1 && shape[dims - 1] > 1 && stride[dims - 1] != 1) {
      fail("must have a contiguous last dimension");
    }
  }

  explicit operator bool() const { return present(); }
  bool present() const { return dims > 0; }

  // Shape and type must be these; -1 takes any size.
  const View& expect(Dtype type, std::initializer_list<int64_t> sizes) const {
    bool same = present() && dtype == type && dims == static_cast<int>(sizes.size());
    int i = 0;
    for (const int64_t size : sizes) {
      same = same && (size < 0 || size == shape[i]);
      ++i;
    }
    if (same) return *this;
    std::string expected, came;
    for (const int64_t size : sizes) {
      expected += expected.empty() ? "" : ", ";
      expected += size < 0 ? "any" : std::to_string(size);
    }
    for (int j = 0; j < dims; ++j) came += (j ? ", " : "") + std::to_string(shape[j]);
    fail("must be [" + expected + "] of " + kDtypeNames[static_cast<int>(type)] + ", got [" + came +
         "] of " + kDtypeNames[static_cast<int>(dtype)]);
  }

  // A vector of this type and size whose elements lie one after the other.
  const View& expect_dense(Dtype type, int64_t size) const {
    expect(type, {size});
    if (size > 1 && stride[0] != 1) fail("must be contiguous");
    return *this;
  }

  // One element of any floating type.
  float number(int64_t offset) const {
    if (dtype == Dtype::kFloat32) return as<float>()[offset];
    if (dtype == Dtype::kBFloat16) return to_float(as<bf16>()[offset]);
    if (dtype == Dtype::kFloat16) return to_float(as<fp16>()[offset]);
    if (dtype == Dtype::kFloat64) return static_cast<float>(as<double>()[offset]);
    fail("must be of a floating type");
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  Rows rows() const { return {data, stride[0], stride[1], stride[2]}; }
  Rows ragged_rows() const { return {data, 0, stride[0], stride[1]}; }

  // 0 along a broadcast dimension.
  int64_t step(int i) const { return shape[i] == 1 ? 0 : stride[i]; }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(std::string(name) + " " + what);
  }

 private:
  static pybind11::object taken(PyObject* made) {
    if (!made) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  }
};

}  // namespace specattn
