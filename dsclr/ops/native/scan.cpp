// The CPU scan of similarity tiles: collect what can still enter a row's top k, then rescore it exactly.
// What the numbers mean, and why the result is exact, is told in dsclr/ops/collect.py.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

// One build serves every x86-64 processor: the loader picks the widest version that runs.
#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)
#define DISPATCHED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DISPATCHED
#endif

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kChunk = 64;

struct Entry {
  float value;
  int32_t key;  // of the keys at hand, or -1 - slot of the running top k
};
static_assert(sizeof(Entry) == sizeof(int64_t), "entries live in an int64 tensor");

inline float wide(float x) { return x; }
inline float wide(at::BFloat16 x) { return static_cast<float>(x); }
inline float wide(at::Half x) { return static_cast<float>(x); }

inline float from_bits(uint16_t bits) {
  const uint32_t shifted = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &shifted, sizeof value);
  return value;
}

// First chunk of 64 at or after `from` with a score that reaches its threshold; the unfinished tail counts as one.
DISPATCHED int64_t next_hit(const float* scores, int64_t from, int64_t n, float threshold) {
  for (; from + kChunk <= n; from += kChunk) {
    int hit = 0;
    for (int64_t i = 0; i < kChunk; ++i) hit |= scores[from + i] >= threshold;
    if (hit) break;
  }
  return from;
}

DISPATCHED int64_t next_hit_bf16(const uint16_t* scores, int64_t from, int64_t n, float threshold) {
  for (; from + kChunk <= n; from += kChunk) {
    int hit = 0;
    for (int64_t i = 0; i < kChunk; ++i) hit |= from_bits(scores[from + i]) >= threshold;
    if (hit) break;
  }
  return from;
}

DISPATCHED int64_t next_hit_each(const float* scores, const float* thresholds, int64_t from, int64_t n) {
  for (; from + kChunk <= n; from += kChunk) {
    int hit = 0;
    for (int64_t i = 0; i < kChunk; ++i) hit |= scores[from + i] >= thresholds[from + i];
    if (hit) break;
  }
  return from;
}

DISPATCHED int64_t next_hit_each_bf16(const uint16_t* scores, const float* thresholds, int64_t from, int64_t n) {
  for (; from + kChunk <= n; from += kChunk) {
    int hit = 0;
    for (int64_t i = 0; i < kChunk; ++i) hit |= from_bits(scores[from + i]) >= thresholds[from + i];
    if (hit) break;
  }
  return from;
}

inline int64_t find(const float* s, int64_t from, int64_t n, float t) { return next_hit(s, from, n, t); }
inline int64_t find(const at::BFloat16* s, int64_t from, int64_t n, float t) {
  return next_hit_bf16(reinterpret_cast<const uint16_t*>(s), from, n, t);
}
inline int64_t find_each(const float* s, const float* t, int64_t from, int64_t n) {
  return next_hit_each(s, t, from, n);
}
inline int64_t find_each(const at::BFloat16* s, const float* t, int64_t from, int64_t n) {
  return next_hit_each_bf16(reinterpret_cast<const uint16_t*>(s), t, from, n);
}

// Eight floats at once; compilers lower them to what each version of a DISPATCHED function may use.
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
constexpr int64_t kLanes = 8;

inline __attribute__((always_inline)) void load(Floats& v, const float* x) { std::memcpy(&v, x, sizeof v); }

// exp by 2^n and a polynomial on |r| <= ln 2 / 2 (Cephes' expf); 0 below -87.
inline __attribute__((always_inline)) void exponential(Floats& x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Ints tiny = x < -87.0f;
  const Ints kept = ~tiny;
  const Floats inside = reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & kept);  // 0 where tiny
  const Floats n = (inside * 1.44269504088896341f + kRound) - kRound;
  const Floats r = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints bits = reinterpret_cast<Ints>(p) + (__builtin_convertvector(n, Ints) << 23);
  x = reinterpret_cast<Floats>(bits & kept);
}

// The sum of products in double, in sixteen lanes whatever the processor. Products of two float32 numbers are exact in
// double, so fusing multiplication and addition changes nothing.
DISPATCHED double dot(const float* x, const float* y, int64_t n) {
  typedef float Four __attribute__((vector_size(16)));
  typedef double Doubles __attribute__((vector_size(32)));
  Doubles sums[4] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 4; ++l) {
      Four u, v;
      std::memcpy(&u, x + i + 4 * l, sizeof u);
      std::memcpy(&v, y + i + 4 * l, sizeof v);
      sums[l] += __builtin_convertvector(u, Doubles) * __builtin_convertvector(v, Doubles);
    }
  }
  const Doubles sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double rest = 0;
  for (; i < n; ++i) rest += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + rest;
}

DISPATCHED float largest(const float* x, int64_t n) {
  Floats most, v;
  for (int l = 0; l < kLanes; ++l) most[l] = kNone;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load(v, x + i);
    most = v > most ? v : most;
  }
  float result = kNone;
  for (int l = 0; l < kLanes; ++l) result = std::max(result, most[l]);
  for (; i < n; ++i) result = std::max(result, x[i]);
  return result;
}

// x <- exp(scale x - top), returns the sum
DISPATCHED double exponentials(float* x, int64_t n, float scale, float top) {
  double total = 0;
  Floats v = {};
  int64_t i = 0;
  while (i + kLanes <= n) {
    // Short float sums, added up in double.
    const int64_t stop = std::min(i + 128 * kLanes, n - n % kLanes);
    Floats sum = {};
    for (; i < stop; i += kLanes) {
      load(v, x + i);
      v = v * scale - top;
      exponential(v);
      std::memcpy(x + i, &v, sizeof v);
      sum += v;
    }
    for (int l = 0; l < kLanes; ++l) total += sum[l];
  }
  for (int64_t l = 0; l < n - i; ++l) v[l] = x[i + l] * scale - top;
  exponential(v);
  for (int64_t l = 0; l < n - i; ++l) total += x[i + l] = v[l];
  return total;
}

// The running state of a set of rows, one slot a row.
struct Rows {
  Entry* entries;
  int32_t* count;
  float* kth;
  float* threshold;
  float* dropped;
  const float* margin;
  const float* limit;  // null: none
  const int64_t* ids;  // null: none
  int64_t capacity, k, keep;

  void compress(int64_t row) const {
    Entry* e = entries + row * capacity;
    int64_t n = count[row];
    if (n < k) return;
    const auto larger = [](const Entry& x, const Entry& y) { return x.value > y.value; };
    std::nth_element(e, e + k - 1, e + n, larger);
    kth[row] = std::max(kth[row], e[k - 1].value);
    const float t = threshold[row] = kth[row] - margin[row];
    n = std::partition(e + k, e + n, [t](const Entry& x) { return x.value >= t; }) - e;
    if (n > keep) {
      std::nth_element(e + k, e + keep, e + n, larger);
      dropped[row] = std::max(dropped[row], e[keep].value);
      n = keep;
    }
    count[row] = static_cast<int32_t>(n);
  }

  // Returns whether the score counts as valid.
  bool push(int64_t row, float value, int64_t key, int64_t key_id, int64_t* over) const {
    if (ids && ids[row] == key_id) return false;
    if (limit && value > limit[row] + margin[row]) {
      ++*over;
      return false;
    }
    entries[row * capacity + count[row]] = Entry{value, static_cast<int32_t>(key)};
    if (++count[row] == capacity) compress(row);
    return true;
  }
};

Rows rows_of(const at::Tensor& entries, const at::Tensor& count, const at::Tensor& bounds, const at::Tensor& margin,
             const std::optional<at::Tensor>& limit, const std::optional<at::Tensor>& ids, int64_t k, int64_t keep) {
  TORCH_CHECK(bounds.dim() == 2 && bounds.size(0) == 3, "bounds must be (3, R)");
  for (const auto& x : {entries, count, bounds, margin}) TORCH_CHECK(x.is_contiguous(), "state must be contiguous");
  float* b = bounds.data_ptr<float>();
  const int64_t n = bounds.size(1);
  return Rows{reinterpret_cast<Entry*>(entries.data_ptr<int64_t>()),
              count.data_ptr<int32_t>(),
              b,
              b + n,
              b + 2 * n,
              margin.data_ptr<float>(),
              limit ? limit->data_ptr<float>() : nullptr,
              ids ? ids->data_ptr<int64_t>() : nullptr,
              entries.size(1),
              k,
              keep};
}

struct Totals {
  int64_t skipped = 0, selected = 0, over = 0;

  void operator+=(const Totals& other) {
    skipped += other.skipped;
    selected += other.selected;
    over += other.over;
  }
};

// Looks at a row's scores in order of their keys.
template <typename T>
Totals scan_scores(const T* scores, int64_t width, const Rows& state, int64_t row, int64_t first_key,
                   const int64_t* key_ids) {
  Totals totals;
  const float kth = state.kth[row];
  bool beaten = false;
  for (int64_t j = find(scores, 0, width, state.threshold[row]); j < width;) {
    const int64_t stop = std::min(j + kChunk, width);
    for (; j < stop; ++j) {
      const float value = wide(scores[j]);
      if (!(value >= state.threshold[row])) continue;
      const int64_t key = first_key + j;
      if (!state.push(row, value, key, key_ids ? key_ids[key] : 0, &totals.over)) continue;
      ++totals.selected;
      beaten |= value > kth;
    }
    j = find(scores, j, width, state.threshold[row]);
  }
  if (beaten) state.compress(row);
  totals.skipped = !beaten;
  return totals;
}

// A row's first scores: nearly all would be pushed, so one selection finds a threshold first.
template <typename T>
Totals scan_first(const T* scores, int64_t width, const Rows& state, int64_t row, int64_t first_key,
                  const int64_t* key_ids, std::vector<float>& scratch) {
  // Void entries (equal ids, above the limit) count in the selection; this many are expected at the most.
  constexpr int64_t kVoid = 2;
  const int64_t place = state.k - 1 + kVoid;
  // The k-th of the maxima of groups of scores is at most the k-th score.
  const int64_t groups = 2 * (place + 1);
  if (state.count[row] > 0 || width < 2 * groups)
    return scan_scores(scores, width, state, row, first_key, key_ids);
  scratch.resize(groups);
  for (int64_t j = 0; j < groups; ++j) scratch[j] = wide(scores[j]);
  for (int64_t start = groups; start + groups <= width; start += groups)
    for (int64_t j = 0; j < groups; ++j) scratch[j] = std::max(scratch[j], wide(scores[start + j]));
  std::nth_element(scratch.begin(), scratch.begin() + place, scratch.end(), std::greater<float>());
  const float bound = scratch[place];
  state.threshold[row] = bound - state.margin[row];
  const Totals totals = scan_scores(scores, width, state, row, first_key, key_ids);
  // With k valid entries at or above the bound nothing below the threshold can belong to the top k.
  if (state.kth[row] >= bound) return totals;
  state.count[row] = 0;
  state.kth[row] = state.threshold[row] = state.dropped[row] = kNone;
  return scan_scores(scores, width, state, row, first_key, key_ids);
}

using Sums = std::atomic<int64_t>[3];

void add(Sums& sums, const Totals& totals) {
  sums[0] += totals.skipped;
  sums[1] += totals.selected;
  sums[2] += totals.over;
}

template <typename T>
void scan_rows(const T* tile, int64_t height, int64_t width, const Rows& state, int64_t first_row, int64_t first_key,
               const int64_t* key_ids, Sums& sums) {
  at::parallel_for(0, height, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    Totals totals;
    for (int64_t i = begin; i < end; ++i)
      totals += scan_first(tile + i * width, width, state, first_row + i, first_key, key_ids, scratch);
    add(sums, totals);
  });
}

template <typename T>
void scan_columns(const T* tile, int64_t height, int64_t width, const Rows& state, int64_t first_row,
                  int64_t first_key, const int64_t* key_ids, Sums& sums) {
  // Threads own ranges of columns; whole chunks keep them off each other's cache lines.
  const int64_t chunks = (width + kChunk - 1) / kChunk;
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    const int64_t left = begin * kChunk, right = std::min(end * kChunk, width);
    Totals totals;
    if (state.count[first_row + left] == 0) {
      // Columns that have seen nothing take their first scores one column at a time.
      std::vector<float> scratch, turned(kChunk * height);
      for (int64_t start = left; start < right; start += kChunk) {
        const int64_t some = std::min(kChunk, right - start);
        for (int64_t i = 0; i < height; ++i)
          for (int64_t j = 0; j < some; ++j) turned[j * height + i] = wide(tile[i * width + start + j]);
        for (int64_t j = 0; j < some; ++j)
          totals +=
              scan_first(&turned[j * height], height, state, first_row + start + j, first_key, key_ids, scratch);
      }
      add(sums, totals);
      return;
    }
    const float* thresholds = state.threshold + first_row;
    std::vector<float> kth(state.kth + first_row + left, state.kth + first_row + right);
    std::vector<uint8_t> beaten(right - left, 0);
    for (int64_t i = 0; i < height; ++i) {
      const T* scores = tile + i * width;
      const int64_t key = first_key + i;
      for (int64_t j = find_each(scores, thresholds, left, right); j < right;) {
        const int64_t stop = std::min(j + kChunk, right);
        for (; j < stop; ++j) {
          const float value = wide(scores[j]);
          if (!(value >= thresholds[j])) continue;
          if (!state.push(first_row + j, value, key, key_ids ? key_ids[key] : 0, &totals.over)) continue;
          ++totals.selected;
          beaten[j - left] |= value > kth[j - left];
        }
        j = find_each(scores, thresholds, j, right);
      }
    }
    for (int64_t j = left; j < right; ++j) {
      if (beaten[j - left]) state.compress(first_row + j);
      totals.skipped += !beaten[j - left];
    }
    add(sums, totals);
  });
}

// -> rows skipped, scores selected, scores over their row's limit
std::vector<int64_t> visit(const at::Tensor& tile, bool by_column, const at::Tensor& entries, const at::Tensor& count,
                           const at::Tensor& bounds, const at::Tensor& margin, const std::optional<at::Tensor>& limit,
                           const std::optional<at::Tensor>& row_ids, const std::optional<at::Tensor>& key_ids,
                           int64_t first_row, int64_t first_key, int64_t k, int64_t keep) {
  TORCH_CHECK(tile.dim() == 2 && tile.is_contiguous(), "the tile must be a contiguous matrix");
  TORCH_CHECK(first_row + tile.size(by_column ? 1 : 0) <= bounds.size(1), "the tile reaches beyond the rows");
  const Rows state = rows_of(entries, count, bounds, margin, limit, row_ids, k, keep);
  const int64_t* ids = key_ids ? key_ids->data_ptr<int64_t>() : nullptr;
  Sums totals = {};
  const auto run = [&](auto* scores) {
    if (by_column)
      scan_columns(scores, tile.size(0), tile.size(1), state, first_row, first_key, ids, totals);
    else
      scan_rows(scores, tile.size(0), tile.size(1), state, first_row, first_key, ids, totals);
  };
  if (tile.scalar_type() == at::kBFloat16)
    run(tile.data_ptr<at::BFloat16>());
  else
    run(tile.data_ptr<float>());
  return {totals[0].load(), totals[1].load(), totals[2].load()};
}

template <typename T>
void to_float(const T* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = wide(x[i]);
}

// The keys of a row's candidates lie anywhere in memory.
template <typename T>
void prefetch(const T* key, int64_t d) {
  const char* bytes = reinterpret_cast<const char*>(key);
  for (int64_t i = 0; i < d * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i);
}

template <typename T>
void finish_rows(const T* q, const T* keys, int64_t d, const Rows& state, int64_t n, int64_t offset,
                 const float* old_values, const int64_t* old_indices, float* values, int64_t* indices, bool* redo, std::atomic<int64_t>& over) {
  struct Scored {
    float value;
    int64_t index;
  };
  at::parallel_for(0, n, 4, [&](int64_t begin, int64_t end) {
    std::vector<Scored> scored;
    std::vector<float> query(d), other(d);
    for (int64_t row = begin; row < end; ++row) {
      state.compress(row);
      const Entry* e = state.entries + row * state.capacity;
      const float threshold = state.threshold[row];
      to_float(q + row * d, query.data(), d);
      int64_t removed = 0;
      scored.clear();
      for (int64_t i = 0; i < state.count[row]; ++i) {
        if (e[i].value < threshold) continue;
        if (e[i].key < 0) {
          const int64_t slot = row * state.k + (-1 - e[i].key);
          scored.push_back({old_values[slot], old_indices[slot]});
          continue;
        }
        const T* key = keys + static_cast<int64_t>(e[i].key) * d;
        if (i + 1 < state.count[row] && e[i + 1].key >= 0) prefetch(keys + static_cast<int64_t>(e[i + 1].key) * d, d);
        const float* exact_key;
        if constexpr (std::is_same_v<T, float>) {
          exact_key = key;
        } else {
          to_float(key, other.data(), d);
          exact_key = other.data();
        }
        const float value = static_cast<float>(dot(query.data(), exact_key, d));
        if (state.limit && value > state.limit[row])
          ++removed;
        else
          scored.push_back({value, offset + e[i].key});
      }
      const int64_t found = std::min<int64_t>(state.k, scored.size());
      std::partial_sort(scored.begin(), scored.begin() + found, scored.end(), [](const Scored& x, const Scored& y) {
        return x.value != y.value ? x.value > y.value : x.index < y.index;
      });
      for (int64_t i = 0; i < state.k; ++i) {
        values[row * state.k + i] = i < found ? scored[i].value : kNone;
        indices[row * state.k + i] = i < found ? scored[i].index : -1;
      }
      over += removed;
      redo[row] = removed > 0 || (state.dropped[row] > kNone && state.dropped[row] >= threshold);
    }
  });
}

// -> values (R, k), indices (R, k), rows (R,) whose candidates did not suffice, candidates over their row's limit
std::tuple<at::Tensor, at::Tensor, at::Tensor, int64_t> finish(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& entries, const at::Tensor& count,
    const at::Tensor& bounds, const at::Tensor& margin, const std::optional<at::Tensor>& limit, int64_t k,
    int64_t keep, int64_t offset, const std::optional<at::Tensor>& old_values,
    const std::optional<at::Tensor>& old_indices) {
  TORCH_CHECK(q.is_contiguous() && keys.is_contiguous(), "q and keys must be contiguous");
  TORCH_CHECK(!old_values || (old_values->is_contiguous() && old_indices && old_indices->is_contiguous()),
              "the earlier result must be contiguous");
  const Rows state = rows_of(entries, count, bounds, margin, limit, std::nullopt, k, keep);
  const int64_t n = q.size(0);
  auto values = at::empty({n, k}, q.options().dtype(at::kFloat));
  auto indices = at::empty({n, k}, q.options().dtype(at::kLong));
  auto redo = at::empty({n}, q.options().dtype(at::kBool));
  std::atomic<int64_t> over{0};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, q.scalar_type(), "dsclr_finish", [&] {
    if constexpr (!std::is_same_v<scalar_t, double>)
      finish_rows<scalar_t>(q.data_ptr<scalar_t>(), keys.data_ptr<scalar_t>(), q.size(1), state, n, offset,
                            old_values ? old_values->data_ptr<float>() : nullptr,
                            old_indices ? old_indices->data_ptr<int64_t>() : nullptr, values.data_ptr<float>(),
                            indices.data_ptr<int64_t>(), redo.data_ptr<bool>(), over);
    else
      TORCH_CHECK(false, "float64 is not for the native scan");
  });
  return {values, indices, redo, over.load()};
}

// tile <- exp(scale tile - top) by row -> top (R,), 0 where a row is -inf throughout, and the sums (R,)
std::tuple<at::Tensor, at::Tensor> exp_rows(const at::Tensor& tile, double scale) {
  TORCH_CHECK(tile.dim() == 2 && tile.is_contiguous() && scale > 0, "a contiguous matrix and a positive scale");
  const int64_t width = tile.size(1);
  auto tops = at::empty({tile.size(0)}, tile.options());
  auto sums = at::empty({tile.size(0)}, tile.options());
  float *scores = tile.data_ptr<float>(), *top = tops.data_ptr<float>(), *sum = sums.data_ptr<float>();
  at::parallel_for(0, tile.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float most = largest(scores + row * width, width);
      top[row] = most == kNone ? 0.0f : most * static_cast<float>(scale);
      sum[row] = static_cast<float>(exponentials(scores + row * width, width, static_cast<float>(scale), top[row]));
    }
  });
  return {tops, sums};
}

}  // namespace

TORCH_LIBRARY(dsclr, m) {
  m.def("exp_rows(Tensor(a!) tile, float scale) -> (Tensor, Tensor)");
  m.def(
      "visit(Tensor tile, bool by_column, Tensor(a!) entries, Tensor(b!) count, Tensor(c!) bounds, Tensor margin, "
      "Tensor? limit, Tensor? row_ids, Tensor? key_ids, int first_row, int first_key, int k, int keep) -> int[]");
  m.def(
      "finish(Tensor q, Tensor keys, Tensor(a!) entries, Tensor(b!) count, Tensor(c!) bounds, Tensor margin, "
      "Tensor? limit, int k, int keep, int offset, Tensor? old_values, Tensor? old_indices) "
      "-> (Tensor, Tensor, Tensor, int)");
}

TORCH_LIBRARY_IMPL(dsclr, CPU, m) {
  m.impl("visit", &visit);
  m.impl("finish", &finish);
  m.impl("exp_rows", &exp_rows);
}
