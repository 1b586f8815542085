// Arguments of Python as values of operators.
#pragma once

#include <forward_list>
#include <string>
#include <vector>

#include "../view.h"
#include "object.h"

namespace specattn {

// The functions by which a tensor describes itself without a call of Python: DLPack 1.2's exchange
// table, which `torch.Tensor.__dlpack_c_exchange_api__` holds. Nothing here is linked against
// torch.
struct ExchangeApi {
  struct Header {
    uint32_t major, minor;
    Header* older;
  } header;
  void* functions_for_owners[3];
  int (*describe)(void* tensor, DLTensor* described);  // valid while the tensor lives unchanged
  void* current_stream;
};

class TensorType {
 public:
  // Loads torch's; throws PythonError where there is none.
  void load() {
    const Object torch = Object::made(PyImport_ImportModule("torch"));
    Object type = Object::made(PyObject_GetAttrString(torch.get(), "Tensor"));
    const Object table =
        Object::made(PyObject_GetAttrString(type.get(), "__dlpack_c_exchange_api__"));
    type_ = reinterpret_cast<PyTypeObject*>(type.release());
    api_ = static_cast<ExchangeApi*>(PyCapsule_GetPointer(table.get(), "dlpack_exchange_api"));
    if (!api_) throw PythonError();
    if (api_->header.major != 1) {
      PyErr_SetString(PyExc_ImportError, "torch speaks another DLPack than version 1");
      throw PythonError();
    }
  }

  bool holds(PyObject* object) const {
    PyTypeObject* const type = Py_TYPE(object);
    return type == type_ || PyType_IsSubtype(type, type_);
  }
  void describe(PyObject* tensor, DLTensor* described) const {
    if (api_->describe(tensor, described)) throw PythonError();
  }

 private:
  PyTypeObject* type_ = nullptr;
  const ExchangeApi* api_ = nullptr;
};
inline TensorType tensor_type;

// Holds what values point to. Tensors are described in place, lists are copied.
class Values {
 public:
  static constexpr Py_ssize_t kMost = 32;

  Values(PyObject* const* objects, Py_ssize_t count) : count_(count) {
    if (count > kMost) throw WrongKind("too many arguments");
    for (Py_ssize_t i = 0; i < count; ++i) values_[i] = value_of(objects[i], &tensors_[i]);
  }
  Values(const Values&) = delete;
  Values& operator=(const Values&) = delete;

  const Value* data() const { return values_; }
  Py_ssize_t count() const { return count_; }

 private:
  Value value_of(PyObject* object, DLTensor* room) {
    if (object == Py_None) return {};
    if (tensor_type.holds(object)) {
      tensor_type.describe(object, room);
      return room;
    }
    if (PyBool_Check(object)) return object == Py_True;
    if (PyLong_Check(object) || PyIndex_Check(object)) return integer(object);
    if (PyFloat_Check(object)) return PyFloat_AsDouble(object);
    if (PyUnicode_Check(object)) return text(object);
    if (PyList_Check(object) || PyTuple_Check(object)) return list(object);
    throw WrongKind("expected tensors, numbers, texts and lists of them, got " + type_name(object));
  }

  static Value integer(PyObject* object) {
    const int64_t integer = PyLong_AsLongLong(object);
    if (integer == -1 && PyErr_Occurred()) throw PythonError();
    return integer;
  }

  static Value text(PyObject* object) {
    const char* const text = PyUnicode_AsUTF8AndSize(object, nullptr);
    if (!text) throw PythonError();
    return text;
  }

  Value list(PyObject* object) {
    const bool is_list = PyList_Check(object);
    const Py_ssize_t size = PySequence_Size(object);
    std::vector<Value>& items = lists_.emplace_front();
    items.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = is_list ? PyList_GetItem(object, i) : PyTuple_GetItem(object, i);
      if (!item) throw PythonError();
      items.push_back(value_of(item, tensor_type.holds(item) ? &listed_.emplace_front() : nullptr));
    }
    return {items.data(), items.size()};
  }

  Py_ssize_t count_;
  Value values_[kMost];
  DLTensor tensors_[kMost];
  std::forward_list<std::vector<Value>> lists_;
  std::forward_list<DLTensor> listed_;
};

// A tensor of Python, or None.
inline View view(const char* name, PyObject* tensor) {
  const Values values(&tensor, 1);
  return {name, values.data()[0]};
}

}  // namespace specattn
