// Functions and classes of C++ for Python: arguments by position or name, errors as exceptions.
#pragma once

#include <array>
#include <cstring>
#include <new>
#include <stdexcept>

#include "object.h"

namespace specattn {

// Sets what Python raises for the exception that is being handled.
inline void set_error() noexcept {
  try {
    throw;
  } catch (const PythonError&) {
  } catch (const WrongKind& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

template <class Function>
PyObject* guarded(const Function& function) noexcept {
  try {
    return function();
  } catch (...) {
    set_error();
    return nullptr;
  }
}

// Parameters of a function, in order; `given` are by position, then by name.
template <size_t N>
class Parameters {
 public:
  std::array<const char*, N> names = {};

  std::array<PyObject*, N> arrange(PyObject* const* given, Py_ssize_t positional,
                                   PyObject* keywords) const {
    std::array<PyObject*, N> arranged = {};
    if (positional > static_cast<Py_ssize_t>(N)) throw WrongKind("too many arguments");
    for (Py_ssize_t i = 0; i < positional; ++i) arranged[static_cast<size_t>(i)] = given[i];
    const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject*& place = arranged[place_of(PyTuple_GetItem(keywords, i))];
      if (place) throw WrongKind("an argument was given twice");
      place = given[positional + i];
    }
    return arranged;
  }

 private:
  size_t place_of(PyObject* name) const {
    for (size_t i = 0; i < N; ++i) {
      if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) return i;
    }
    throw WrongKind("there is no argument " + from_python<std::string>(name));
  }
};

template <class T>
T argument(PyObject* object, const char* name) {
  constexpr bool may_miss = IsOptional<T>::value || std::is_same_v<T, PyObject*>;
  if (!may_miss && !object) throw WrongKind(std::string("the argument ") + name + " is missing");
  return from_python<T>(object);
}

template <class F>
struct Signature;
template <class R, class... A>
struct Signature<R (*)(A...)> {
  using Result = R;
  using All = std::tuple<std::decay_t<A>...>;
  static constexpr size_t kCount = sizeof...(A);
};

// Whether the first parameter is an object whose method a function is.
template <class Arguments>
constexpr bool is_method() {
  if constexpr (std::tuple_size_v<Arguments> == 0)
    return false;
  else
    return kIsClass<std::tuple_element_t<0, Arguments>>;
}

// F with what Python calls.
template <auto F>
struct Bound {
  using Of = Signature<decltype(F)>;
  static constexpr size_t kSelf = is_method<typename Of::All>() ? 1 : 0;
  static inline Parameters<Of::kCount - kSelf> parameters;

  static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t positional,
                        PyObject* keywords) noexcept {
    return guarded([&] {
      const auto arranged = parameters.arrange(given, positional, keywords);
      return run(self, arranged, std::make_index_sequence<Of::kCount - kSelf>());
    });
  }

  // Makes an object from a tuple of arguments and a dict of named ones.
  static PyObject* make(PyTypeObject* type, PyObject* given, PyObject* keywords) noexcept {
    return guarded([&] {
      std::vector<PyObject*> all;
      for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) all.push_back(PyTuple_GetItem(given, i));
      const Object names = keywords ? Object::made(PySequence_Tuple(keywords)) : Object();
      for (Py_ssize_t i = 0; names.get() && i < PyTuple_Size(names.get()); ++i) {
        all.push_back(PyDict_GetItemWithError(keywords, PyTuple_GetItem(names.get(), i)));
      }
      const auto arranged = parameters.arrange(all.data(), PyTuple_Size(given), names.get());
      auto object = construct(arranged, std::make_index_sequence<Of::kCount>());
      using T = typename decltype(object)::element_type;
      const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
      Object made = Object::made(allocate(type, 0));
      new (&reinterpret_cast<Instance<T>*>(made.get())->object)
          std::shared_ptr<T>(std::move(object));
      return made.release();
    });
  }

 private:
  template <class Arranged, size_t... I>
  static PyObject* run(PyObject* self, const Arranged& arranged, std::index_sequence<I...>) {
    const auto invoke = [&]() -> typename Of::Result {
      if constexpr (kSelf == 1) {
        return F(*instance<std::tuple_element_t<0, typename Of::All>>(self), take<I>(arranged)...);
      } else {
        return F(take<I>(arranged)...);
      }
    };
    if constexpr (std::is_void_v<typename Of::Result>) {
      invoke();
      return Object::held(Py_None).release();
    } else {
      return to_python(invoke()).release();
    }
  }
  template <class Arranged, size_t... I>
  static typename Of::Result construct(const Arranged& arranged, std::index_sequence<I...>) {
    return F(take<I>(arranged)...);
  }
  template <size_t I, class Arranged>
  static auto take(const Arranged& arranged) {
    return argument<std::tuple_element_t<I + kSelf, typename Of::All>>(arranged[I],
                                                                       parameters.names[I]);
  }
};

// A function or a method, under a name; whoever defines it keeps the definition.
template <auto F, class... Names>
PyMethodDef function(const char* name, const char* doc, Names... names) {
  static_assert(sizeof...(Names) == Bound<F>::Of::kCount - Bound<F>::kSelf, "name every parameter");
  Bound<F>::parameters.names = {names...};
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Bound<F>::call)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

template <auto F>
PyObject* property(PyObject* self, void*) {
  return Bound<F>::call(self, nullptr, 0, nullptr);
}

template <class T>
void delete_instance(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<Instance<T>*>(self)->object.~shared_ptr();
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DecRef(reinterpret_cast<PyObject*>(type));
}

template <class T, auto F>
Py_ssize_t length_of(PyObject* self) {
  return static_cast<Py_ssize_t>(F(*reinterpret_cast<Instance<T>*>(self)->object));
}

// What a class has; `methods` and `properties` end with an empty one, and stay.
struct Members {
  const char *name, *doc;  // name: with the module's
  PyMethodDef* methods;
  PyGetSetDef* properties = nullptr;
  lenfunc length = nullptr;
};

// Adds the class of T, of which Make makes objects, to a module.
template <class T, auto Make, class... Names>
void add_class(PyObject* module, const Members& members, Names... names) {
  Bound<Make>::parameters.names = {names...};
  std::vector<PyType_Slot> slots = {
      {Py_tp_new, reinterpret_cast<void*>(&Bound<Make>::make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&delete_instance<T>)},
      {Py_tp_doc, const_cast<char*>(members.doc)},
      {Py_tp_methods, members.methods},
  };
  if (members.properties) slots.push_back({Py_tp_getset, members.properties});
  if (members.length) slots.push_back({Py_sq_length, reinterpret_cast<void*>(members.length)});
  slots.push_back({0, nullptr});
  PyType_Spec spec = {members.name, sizeof(Instance<T>), 0, Py_TPFLAGS_DEFAULT, slots.data()};
  Object type = Object::made(PyType_FromSpec(&spec));
  Instance<T>::type = reinterpret_cast<PyTypeObject*>(Object::held(type.get()).release());
  const char* const name = std::strrchr(members.name, '.') + 1;
  if (PyModule_AddObject(module, name, type.get())) throw PythonError();
  type.release();
}

}  // namespace specattn
