// A tensor as Python hands it over: (address, shape, strides, dtype), strides in elements.
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "problem.h"

namespace specattn {

struct View {
  const char* name = "";
  void* data = nullptr;
  int dims = 0;
  int64_t shape[6] = {}, stride[6] = {};
  Dtype dtype = Dtype::kFloat32;

  // None gives a view without data.
  View(const char* name, pybind11::handle from) : name(name) {
    if (from.is_none()) return;
    PyObject* const tuple = from.ptr();
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4) fail("is not a tensor's view");
    data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(tuple, 0));
    PyObject *sizes = PyTuple_GET_ITEM(tuple, 1), *steps = PyTuple_GET_ITEM(tuple, 2);
    if (!PyTuple_Check(sizes) || !PyTuple_Check(steps) || PyTuple_GET_SIZE(sizes) > 6 ||
        PyTuple_GET_SIZE(sizes) != PyTuple_GET_SIZE(steps)) {
      fail("has no plain shape and strides");
    }
    dims = static_cast<int>(PyTuple_GET_SIZE(sizes));
    for (int i = 0; i < dims; ++i) {
      shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes, i));
      stride[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(steps, i));
    }
    dtype = static_cast<Dtype>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, 3)));
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    if (dims > 1 && shape[dims - 1] > 1 && stride[dims - 1] != 1) {
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
    fail("must be [" + expected + "] of " + type_name(type) + ", got [" + came + "] of " +
         type_name(dtype));
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  Rows rows() const { return {data, stride[0], stride[1], stride[2]}; }

  // 0 along a broadcast dimension.
  int64_t step(int i) const { return shape[i] == 1 ? 0 : stride[i]; }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument(std::string(name) + " " + what);
  }

 private:
  static const char* type_name(Dtype type) {
    static const char* const names[] = {"float32", "bfloat16", "float16", "int32", "int64"};
    return names[static_cast<int>(type)];
  }
};

}  // namespace specattn
