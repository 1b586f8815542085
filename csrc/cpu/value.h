// What a caller hands to an operator, in whatever language: tensors as DLPack describes them,
// numbers, texts and lists of these. Nothing here knows Python.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "include/specattn.h"

namespace specattn {

// An argument of the wrong kind: to Python a TypeError.
struct WrongKind : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct Value {
  enum class Kind : int32_t { kNone, kTensor, kInteger, kNumber, kBool, kText, kList };

  Value() = default;
  Value(const DLTensor* tensor) : kind(tensor ? Kind::kTensor : Kind::kNone), tensor(tensor) {}
  template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
  Value(T integer)
      : kind(std::is_same_v<T, bool> ? Kind::kBool : Kind::kInteger),
        integer(static_cast<int64_t>(integer)) {}
  Value(double number) : kind(Kind::kNumber), number(number) {}
  Value(const char* text) : kind(text ? Kind::kText : Kind::kNone), text(text) {}
  Value(const Value* items, size_t size)
      : kind(Kind::kList), size(static_cast<int32_t>(size)), items(items) {}

  Kind kind = Kind::kNone;
  int32_t size = 0;  // of a list
  union {
    const DLTensor* tensor;
    int64_t integer;
    double number;
    const char* text;
    const Value* items = nullptr;
  };

  bool none() const { return kind == Kind::kNone; }
  const char* kind_name() const {
    constexpr const char* names[] = {"None",   "a tensor", "an integer", "a number",
                                     "a bool", "a text",   "a list"};
    return names[static_cast<int>(kind)];
  }

  template <class T>
  T as(int64_t place) const;

 private:
  [[noreturn]] void refuse(int64_t place, const char* expected) const {
    throw WrongKind("argument " + std::to_string(place) + ": expected " + expected + ", got " +
                    kind_name());
  }
};

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

// The value as a T; `place` counts it among the arguments, from 1.
template <class T>
T Value::as(int64_t place) const {
  const bool whole = kind == Kind::kInteger || kind == Kind::kBool;
  if constexpr (std::is_same_v<T, Value>) {  // a list's items may be anything
    return *this;
  } else if constexpr (IsOptional<T>::value) {
    if (none()) return std::nullopt;
    return as<typename T::value_type>(place);
  } else if constexpr (std::is_same_v<T, bool>) {
    if (kind != Kind::kBool) refuse(place, "a bool");
    return integer != 0;
  } else if constexpr (std::is_integral_v<T>) {
    if (!whole) refuse(place, "an integer");
    return static_cast<T>(integer);
  } else if constexpr (std::is_same_v<T, double>) {
    if (kind == Kind::kNumber) return number;
    if (!whole) refuse(place, "a number");
    return static_cast<double>(integer);
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (kind != Kind::kText) refuse(place, "a text");
    return text;
  } else {  // a list
    if (kind != Kind::kList) refuse(place, "a list");
    T list;
    for (int32_t i = 0; i < size; ++i) {
      list.push_back(items[i].as<typename T::value_type>(place));
    }
    return list;
  }
}

}  // namespace specattn
