// Native kernels of a CPU, called by XLA (jax.ffi) with its own thread pool.
//
// `level.h` computes, and is compiled for each set of instructions; the processor decides which one
// runs. Every sum has one order, whatever the number of threads and what else is computed.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

// The best level that this processor has: 3 AVX-512 with VNNI and BF16, 2 without BF16, 1 AVX2, 0
// what every processor has.
extern "C" int ckv_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

namespace {
namespace ffi = xla::ffi;
using Bits = ffi::Buffer<ffi::BF16>;
using Floats = ffi::Buffer<ffi::F32>;
using Whole = ffi::Buffer<ffi::S32>;

// Runs f(0) to f(n - 1) on the pool and on the caller, which waits for no task that has not begun.
template <typename F>
void in_parallel(ffi::ThreadPool& pool, int64_t n, const F& f) {
  struct Shared { std::atomic<int64_t> next{0}, done{0}; };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), n) - 1;
  auto shared = std::make_shared<Shared>();
  auto work = [shared, n, &f] {  // one that begins late finds no task, and does not look at f
    for (int64_t i; (i = shared->next.fetch_add(1)) < n; shared->done.fetch_add(1)) f(i);
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  while (shared->done.load() < n) std::this_thread::yield();
}

inline char* aligned(void* from) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + 63) & ~uintptr_t{63});
}

// Memory of this thread that lasts from call to call, a multiple of 64 bytes from 0.
inline char* own_memory(size_t bytes) {
  thread_local std::vector<std::max_align_t> held;
  if (held.size() * sizeof(held[0]) < bytes + 64) held.resize((bytes + 63) / sizeof(held[0]) + 1);
  return aligned(held.data());
}

inline float bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  return reinterpret_cast<const float&>(wide);
}

// One call of score, and its scratch. Rows are a KV head's real queries, in the order [B, S, G].
struct Score {
  const float* q;  // [B, S, K, G, D]
  bool peaks, few;  // few: at most kTogether rows; each key is multiplied where it lies
  int64_t batch, queries, kv_heads, group, dim;
  const uint8_t* codes;  // [T, K, D / 2]
  const float* scale;    // [T, K]
  const int32_t *lengths, *ids;  // ids: the chunks that count, one after the other; null: all
  int64_t tokens, num_tokens, chunk, chunks, rows, most_rows, blocks, most_blocks, lanes;
  float factor;  // of logits, log2(e) included
  int32_t* numbers;  // [K, rows, 2, D / 4]: four int8 each, in the order of keys or of nibbles
  int32_t *base, *two;  // [K, rows]: what belongs to a row's sums; whether it has both numbers
  float *unit, *sums, *tops;  // [K, rows]; [K, rows, blocks, lanes]; [K, rows, most_blocks]
  float* out;                 // [1 or 2, B, K, M]
  int64_t length(int64_t b) const { return std::clamp<int64_t>(lengths[b], 0, queries); }
};

constexpr int kTogether = 4;  // rows that go over a tile of keys, or outputs over a row, at once
constexpr float kRounding = 0x1.8p23f;  // the lowest bits of x + this are x rounded
constexpr float kFar = 8;  // a query's largest number over the root of the mean square
constexpr float kLog2 = 0.6931471805599453f;  // ln(2)
constexpr int kPanel = 2;  // vectors with a row in each lane that are multiplied at once
constexpr int64_t kBlock = 128;  // tokens that are attended to at a time, or one page's
constexpr int64_t kAhead = 8192;  // bytes of weights that are fetched before they are wanted
// Rows of bfloat16 times weights [O, I]: bfloat16, or int8 with scales [O].
struct Product {
  const uint16_t* x;  // [rows, I]
  const char* weight;
  const float* scale;
  float* out;                            // [rows, O]
  int64_t rows, inputs, outputs, bytes;  // of a weight
  char* packed;  // many rows: [panels, I / 2, kPanel] vectors, the last panel perhaps of one
};

// One call of attend over page tokens and then new ones. One query a sequence goes block by block,
// more go in panels of rows.
struct Attend {
  const uint16_t *q, *pages, *k_new, *v_new;           // [B, S, H, D], [P, C, K*D], [B, R, K*D]
  const int32_t *k_table, *v_table, *lengths, *start;  // [B, N] three times, [B]
  int64_t queries, heads, kv_heads, dim, num_pages, chunk, entries, new_tokens;
  int64_t block_tokens, page_blocks, blocks, stride;
  float factor;  // of logits, log2(e) included
  float* parts;  // of one query [B, blocks, H, stride]: the greatest logit, sum of exponentials, out
  uint16_t* out;
  float* lse;
  float* part(int64_t b, int64_t block, int64_t head) const {
    return parts + ((b * blocks + block) * heads + head) * stride;
  }
};

// Packs that lie on disk as `parts` times `rows` of codes, keys and values (`kinds`) in turn.
struct Packs {
  int64_t parts, kinds, rows, dim;
  bool nibbles[2];
};

#define DO(words) _Pragma(#words)
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define BEGIN(features) \
  DO(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END DO(clang attribute pop)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#define BEGIN(features) DO(GCC push_options) DO(GCC target(features))
#define END DO(GCC pop_options)
#endif
#define LANES 4
namespace portable {
#include "level.h"
}
constexpr int64_t lanes_of(int64_t level) { return 4 << std::min<int64_t>(level, 2); }
#if defined(__x86_64__)
#define LANES 8
#define AVX2
BEGIN("avx2,fma")
namespace avx2 {
#include "level.h"
}
END
#define LANES 16
#define AVX512
BEGIN("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
namespace avx512 {
#include "level.h"
}
END
#define LANES 16
#define BFLOAT16
BEGIN("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
namespace avx512_bf16 {
#include "level.h"
}
END
#define AT(level, name) \
  (level > 2 ? avx512_bf16::name : level > 1 ? avx512::name : level ? avx2::name : portable::name)
#else
#define AT(level, name) portable::name
#endif

ffi::Error score(ffi::ThreadPool pool, Floats q, ffi::Buffer<ffi::U8> codes, Floats scale,
                 Whole num_tokens, Whole lengths, Whole ids, ffi::ResultBuffer<ffi::F32> out,
                 ffi::ResultBuffer<ffi::U8> scratch, int64_t chunk, float factor, int64_t level) {
  if (level > ckv_level()) return ffi::Error::Internal("compiled for another processor");
  Score s{};
  const auto dims = q.dimensions(), of_keys = codes.dimensions();
  s.q = q.typed_data();
  s.peaks = out->dimensions()[0] == 2;
  s.kv_heads = of_keys[1], s.tokens = of_keys[0];
  s.batch = dims[0], s.queries = dims[1], s.group = dims[2] / s.kv_heads, s.dim = dims[3];
  s.codes = codes.typed_data();
  s.scale = scale.typed_data(), s.lengths = lengths.typed_data(), s.out = out->typed_data();
  s.ids = ids.element_count() ? ids.typed_data() : nullptr;
  s.chunk = chunk, s.chunks = s.ids ? ids.element_count() : s.tokens / chunk, s.factor = factor;
  s.num_tokens = std::clamp<int64_t>(num_tokens.typed_data()[0], 0, s.chunks * chunk);
  for (int64_t b = 0; b < s.batch; ++b) s.rows += s.group * s.length(b);
  s.most_rows = (s.rows + kTogether - 1) / kTogether * kTogether;
  s.lanes = lanes_of(level);
  s.few = level > 1 && s.rows && s.rows <= kTogether && s.dim <= 128;
  s.blocks = (s.chunks + s.lanes - 1) / s.lanes;
  s.most_blocks = (s.blocks + s.lanes - 1) / s.lanes * s.lanes;
  char* at = aligned(scratch->typed_data());
  const int64_t rows = s.kv_heads * s.most_rows;
  auto take = [&](auto& to, int64_t of_row) {
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(at);
    at = aligned(at + 4 * rows * of_row);
  };
  take(s.sums, s.blocks * s.lanes), take(s.tops, s.most_blocks);
  take(s.numbers, s.dim / 2), take(s.base, 1), take(s.unit, 1), take(s.two, 1);
  if (at > reinterpret_cast<char*>(scratch->typed_data()) + scratch->element_count())
    return ffi::Error::Internal("got too little scratch");
  in_parallel(pool, s.kv_heads, [&](int64_t head) { AT(level, whole_numbers)(s, head); });
  const int64_t share = std::clamp<int64_t>(s.blocks / pool.num_threads() / 8, 1, 8);
  in_parallel(pool, (s.blocks + share - 1) / share, [&](int64_t i) {
    for (int64_t block = i * share; block < std::min((i + 1) * share, s.blocks); ++block)
      AT(level, score_block)(s, block);
  });
  in_parallel(pool, s.batch * s.kv_heads,
              [&](int64_t i) { AT(level, finish)(s, i / s.kv_heads, i % s.kv_heads); });
  return ffi::Error::Success();
}

// The n best of each row [rows, units], best first; of equals the one with the least of `ages` [rows,
// units], of these (or where `ages` is empty) the earlier one.
ffi::Error best(ffi::ThreadPool pool, Floats scores, Whole ages, ffi::ResultBuffer<ffi::F32> values,
                ffi::ResultBuffer<ffi::S32> ids, int64_t) {
  using Key = std::pair<uint64_t, int32_t>;  // the least is the best
  const int64_t units = scores.dimensions()[1], n = ids->dimensions()[1];
  const bool aged = ages.element_count() > 0;
  in_parallel(pool, scores.dimensions()[0], [&](int64_t row) {
    const float* given = scores.typed_data() + row * units;
    auto keys = reinterpret_cast<Key*>(own_memory(sizeof(Key) * units));
    for (int64_t i = 0; i < units; ++i) {
      const float score = aged ? given[i] + 0.0f : given[i];  // with ages zeros are equal
      uint32_t bits;
      std::memcpy(&bits, &score, 4);
      const uint64_t order = bits >> 31 ? bits : ~bits & 0x7fffffff;
      const uint32_t age = aged ? ages.typed_data()[row * units + i] ^ 1u << 31 : 0;
      keys[i] = {order << 32 | age, static_cast<int32_t>(i)};
    }
    if (n < units) std::nth_element(keys, keys + n, keys + units);
    std::sort(keys, keys + n);
    for (int64_t i = 0; i < n; ++i) {
      ids->typed_data()[row * n + i] = keys[i].second;
      values->typed_data()[row * n + i] = given[keys[i].second];
    }
  });
  return ffi::Error::Success();
}

ffi::Error product(ffi::ThreadPool pool, Bits x, ffi::AnyBuffer weight, Floats scale,
                   ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::U8> scratch,
                   int64_t level) {
  if (level > ckv_level()) return ffi::Error::Internal("compiled for another processor");
  const auto sizes = weight.dimensions();
  const Product p{reinterpret_cast<const uint16_t*>(x.typed_data()),
                  static_cast<const char*>(weight.untyped_data()), scale.typed_data(),
                  out->typed_data(),
                  static_cast<int64_t>(x.element_count()) / sizes[1], sizes[1], sizes[0],
                  weight.element_type() == ffi::S8 ? 1 : 2, aligned(scratch->typed_data())};
  if (scratch->element_count()) {
    const int64_t lanes = lanes_of(level), tall = kPanel * lanes;
    const int64_t blocks = (p.outputs + lanes - 1) / lanes;
    const int64_t share = std::clamp<int64_t>(blocks / pool.num_threads() / 8, 1, 8);
    in_parallel(pool, (p.rows + tall - 1) / tall,
                [&](int64_t i) { AT(level, pack_panel)(p, i); });
    in_parallel(pool, (blocks + share - 1) / share, [&](int64_t i) {
      AT(level, product_of_many)(p, i * share * lanes, std::min((i + 1) * share, blocks) * lanes);
    });
    return ffi::Error::Success();
  }
  const int64_t share = std::clamp<int64_t>(p.outputs / pool.num_threads() / 64, 4, 64) * 8;
  in_parallel(pool, (p.outputs + share - 1) / share, [&](int64_t i) {
    AT(level, product)(p, i * share, std::min((i + 1) * share, p.outputs));
  });
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool pool, Bits q, ffi::AnyBuffer pages, Whole k_table, Whole v_table,
                  Whole lengths, Bits k_new, Bits v_new, Whole start,
                  ffi::ResultBuffer<ffi::BF16> out, ffi::ResultBuffer<ffi::F32> lse,
                  ffi::ResultBuffer<ffi::F32> parts, int64_t level) {
  if (level > ckv_level()) return ffi::Error::Internal("compiled for another processor");
  auto bits = [](auto& buffer) { return reinterpret_cast<uint16_t*>(buffer.untyped_data()); };
  const auto dims = q.dimensions(), sizes = parts->dimensions();
  Attend a{bits(q), bits(pages), bits(k_new), bits(v_new), k_table.typed_data(),
           v_table.typed_data(), lengths.typed_data(), start.typed_data()};
  a.queries = dims[1], a.heads = dims[2], a.dim = dims[3];
  a.kv_heads = pages.dimensions()[2] / a.dim;
  a.num_pages = pages.dimensions()[0], a.chunk = pages.dimensions()[1];
  a.entries = k_table.dimensions()[1], a.new_tokens = k_new.dimensions()[1];
  a.block_tokens = std::max<int64_t>(kBlock / a.chunk, 1) * a.chunk;
  a.page_blocks = (a.entries * a.chunk + a.block_tokens - 1) / a.block_tokens;
  a.blocks = sizes[1], a.stride = sizes[3], a.factor = 1 / (kLog2 * std::sqrt(float(a.dim)));
  a.parts = parts->typed_data(), a.out = bits(*out), a.lse = lse->typed_data();
  if (a.queries != 1) {
    const int64_t tall = kPanel * lanes_of(level);
    const int64_t panels = (a.queries * (a.heads / a.kv_heads) + tall - 1) / tall;
    in_parallel(pool, dims[0] * a.kv_heads * panels, [&](int64_t i) {
      const int64_t head = i / panels % a.kv_heads;
      AT(level, attend_rows)(a, i / panels / a.kv_heads, head, i % panels);
    });
    return ffi::Error::Success();
  }
  in_parallel(pool, dims[0] * a.blocks,
              [&](int64_t i) { AT(level, attend_block)(a, i / a.blocks, i % a.blocks); });
  in_parallel(pool, dims[0] * a.heads,
              [&](int64_t i) { AT(level, join_blocks)(a, i / a.heads, i % a.heads); });
  return ffi::Error::Success();
}
}  // namespace

// Decodes n packs of `stored` into their slots of `packs`, of bfloat16; -1: none.
extern "C" void ckv_decode(const uint8_t* stored, int64_t stored_bytes, const int32_t* slots,
                           int64_t n, uint16_t* packs, int64_t parts, int64_t kinds, int64_t rows,
                           int64_t dim, int64_t key_bits, int64_t value_bits, int64_t level) {
  const Packs p{parts, kinds, rows, dim, {key_bits == 4, value_bits == 4}};
  for (; n > 0; --n, stored += stored_bytes, ++slots)
    if (*slots >= 0) AT(level, decode)(p, stored, packs + *slots * parts * rows * dim);
}

#define BIND(name, binding) XLA_FFI_DEFINE_HANDLER_SYMBOL(ckv_##name, name, \
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>() binding .Attr<int64_t>("level"))
BIND(score, .Arg<Floats>().Arg<ffi::Buffer<ffi::U8>>().Arg<Floats>().Arg<Whole>().Arg<Whole>().Arg<Whole>()
    .Ret<Floats>().Ret<ffi::Buffer<ffi::U8>>().Attr<int64_t>("chunk").Attr<float>("factor"));
BIND(best, .Arg<Floats>().Arg<Whole>().Ret<Floats>().Ret<Whole>());
BIND(product, .Arg<Bits>().Arg<ffi::AnyBuffer>().Arg<Floats>()
    .Ret<Floats>().Ret<ffi::Buffer<ffi::U8>>());
BIND(attend, .Arg<Bits>().Arg<ffi::AnyBuffer>().Arg<Whole>().Arg<Whole>().Arg<Whole>().Arg<Bits>()
    .Arg<Bits>().Arg<Whole>().Ret<Bits>().Ret<Floats>().Ret<Floats>());
