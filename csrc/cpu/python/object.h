// Objects of Python and values of C++, by the limited API: one build serves every CPython.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../value.h"

namespace specattn {

// A Python error is set, which the caller of the module gets to see.
struct PythonError {};

// A reference that is held; the interpreter's lock is, too.
class Object {
 public:
  Object() = default;
  // Takes a new reference over; null is an error that was set.
  static Object made(PyObject* reference) {
    if (!reference) throw PythonError();
    Object object;
    object.reference_ = reference;
    return object;
  }
  static Object held(PyObject* reference) {
    Py_IncRef(reference);
    return made(reference);
  }
  Object(Object&& other) noexcept : reference_(std::exchange(other.reference_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(reference_, other.reference_);
    return *this;
  }
  ~Object() { Py_DecRef(reference_); }

  PyObject* get() const { return reference_; }
  PyObject* release() { return std::exchange(reference_, nullptr); }

 private:
  PyObject* reference_ = nullptr;
};

// Lets other threads of Python run meanwhile.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// A C++ object that Python holds. Classes of which there are such name themselves.
template <class T>
inline constexpr bool kIsClass = false;
template <class T>
struct Instance {
  PyObject base;
  std::shared_ptr<T> object;

  static inline PyTypeObject* type = nullptr;
};

inline std::string type_name(PyObject* object) {
  const Object name = Object::made(
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  const char* const text = PyUnicode_AsUTF8AndSize(name.get(), nullptr);
  if (!text) throw PythonError();
  return text;
}

template <class T>
std::shared_ptr<T>& instance(PyObject* object) {
  if (!PyType_IsSubtype(Py_TYPE(object), Instance<T>::type)) {
    throw WrongKind("expected an object of another class, got " + type_name(object));
  }
  return reinterpret_cast<Instance<T>*>(object)->object;
}

template <class T>
struct IsShared : std::false_type {};
template <class T>
struct IsShared<std::shared_ptr<T>> : std::true_type {};

template <class T>
T integer_from(PyObject* object) {
  if constexpr (std::is_unsigned_v<T>) {
    const Object index = Object::made(PyNumber_Index(object));
    const unsigned long long integer = PyLong_AsUnsignedLongLong(index.get());
    if (PyErr_Occurred()) throw PythonError();
    return static_cast<T>(integer);
  } else {
    const long long integer = PyLong_AsLongLong(object);
    if (integer == -1 && PyErr_Occurred()) throw PythonError();
    if (integer < std::numeric_limits<T>::min() || integer > std::numeric_limits<T>::max()) {
      throw WrongKind("expected a smaller integer, got " + std::to_string(integer));
    }
    return static_cast<T>(integer);
  }
}

// A T from an object of Python; from null, which is a missing argument, only what may be missing.
template <class T>
T from_python(PyObject* object) {
  if constexpr (std::is_same_v<T, PyObject*>) {
    return object ? object : Py_None;
  } else if constexpr (IsOptional<T>::value) {
    if (!object || object == Py_None) return std::nullopt;
    return from_python<typename T::value_type>(object);
  } else if constexpr (std::is_same_v<T, bool>) {
    const int truth = PyObject_IsTrue(object);
    if (truth < 0) throw PythonError();
    return truth != 0;
  } else if constexpr (std::is_integral_v<T>) {
    return integer_from<T>(object);
  } else if constexpr (std::is_floating_point_v<T>) {
    const double number = PyFloat_AsDouble(object);
    if (number == -1 && PyErr_Occurred()) throw PythonError();
    return static_cast<T>(number);
  } else if constexpr (std::is_same_v<T, std::string>) {
    const char* const text = PyUnicode_AsUTF8AndSize(object, nullptr);
    if (!text) throw PythonError();
    return text;
  } else if constexpr (std::is_pointer_v<T>) {
    return instance<std::remove_const_t<std::remove_pointer_t<T>>>(object).get();
  } else if constexpr (IsShared<T>::value) {
    return instance<typename T::element_type>(object);
  } else {  // a vector
    const Py_ssize_t size = PySequence_Size(object);
    if (size < 0) throw PythonError();
    T items;
    items.reserve(static_cast<size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      const Object item = Object::made(PySequence_GetItem(object, i));
      items.push_back(from_python<typename T::value_type>(item.get()));
    }
    return items;
  }
}

inline Object to_python(const Object& object) { return Object::held(object.get()); }
inline Object to_python(bool truth) { return Object::held(truth ? Py_True : Py_False); }
inline Object to_python(double number) { return Object::made(PyFloat_FromDouble(number)); }
inline Object to_python(const std::string& text) {
  return Object::made(
      PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
Object to_python(T integer) {
  return Object::made(PyLong_FromLongLong(static_cast<long long>(integer)));
}
template <class... T>
Object to_python(const std::tuple<T...>& items);

template <class T>
Object to_python(const std::vector<T>& items) {
  Object list = Object::made(PyList_New(static_cast<Py_ssize_t>(items.size())));
  Py_ssize_t i = 0;
  for (const T& item : items) PyList_SetItem(list.get(), i++, to_python(item).release());
  return list;
}

template <class... T>
Object to_python(const std::tuple<T...>& items) {
  Object tuple = Object::made(PyTuple_New(sizeof...(T)));
  std::apply(
      [&](const auto&... item) {
        Py_ssize_t i = 0;
        (PyTuple_SetItem(tuple.get(), i++, to_python(item).release()), ...);
      },
      items);
  return tuple;
}

}  // namespace specattn
