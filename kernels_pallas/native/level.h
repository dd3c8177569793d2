// One level of instructions: vectors of LANES 32-bit numbers. See `kernels.cc`.

typedef float F __attribute__((vector_size(4 * LANES)));
typedef F Packed __attribute__((aligned(2)));  // anywhere in memory
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
using Lanes = std::make_integer_sequence<int, LANES>;
constexpr int64_t kTile = LANES == 16 ? 4 : 2;  // key vectors that a few rows go over at once
constexpr int32_t kAbove = LANES == 16 ? 128 : 0;  // what is added to codes of int8

// acc + the products of each lane's four bytes; those of a are nibbles, or int8 and kAbove.
inline I dot(I acc, I a, I b, bool nibbles) {
#if defined(AVX512)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(AVX2)
  const auto x = (__m256i)a, y = (__m256i)b, ones = _mm256_set1_epi16(1);
  const auto pairs = nibbles ? _mm256_maddubs_epi16(x, y)
                             : _mm256_maddubs_epi16(_mm256_abs_epi8(y), _mm256_sign_epi8(x, y));
  return acc + (I)_mm256_madd_epi16(pairs, ones);
#else
  for (int up : {0, 8, 16, 24}) acc += ((a << up) >> 24) * ((b << up) >> 24);
  return acc;
#endif
}

// The first `words` of a vector, zeros behind.
inline I load(const void* from, int64_t words) {
#if defined(AVX512)
  return (I)_mm512_maskz_loadu_epi32(words >= LANES ? 0xffff : (1 << words) - 1, from);
#elif defined(AVX2)
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (I)_mm256_maskload_epi32((const int*)from, (__m256i)(lane < (int32_t)words));
#else
  I found = {};
  std::memcpy(&found, from, 4 * std::min<int64_t>(words, LANES));
  return found;
#endif
}

// Where bit S of a lane's number is set, or is not, what stands S lanes off in the other vector.
template <int S, int... L>
inline void exchange(I& a, I& b, std::integer_sequence<int, L...>) {
  const I low = SHUFFLE(a, b, ((L & S) ? LANES + L - S : L)...);
  b = SHUFFLE(a, b, ((L & S) ? LANES + L : L + S)...);
  a = low;
}

template <int S = 1>
inline void transpose(I* rows) {
  for (int i = 0; i < LANES; ++i)
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], Lanes());
  if constexpr (2 * S < LANES) transpose<2 * S>(rows);
}

inline F greater(F a, F b) { return a > b ? a : b; }
inline F sum(F a, F b) { return a + b; }

// 2 to the power of x, off by 1e-7 of it at most; 0 below the normal numbers.
inline F power_of_2(F x) {
  const F above = x + kRounding, whole = above - kRounding, r = x - whole;
  F p = r * 0.001326472731307149f + 0.009671512991189957f;
  p = p * r + 0.05550733581185341f;
  p = p * r + 0.24022242426872253f;
  p = p * r + 0.6931470036506653f;
  p = p * r + 1.0f;
#if defined(AVX512)
  return (F)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  return (F)(((I)p + ((I)above << 23)) & (x > -126.0f));
#endif
}

// Every lane's number joined with that of the lane S away from it, S halved each time.
template <int S, int Last = 1, int... L, typename Join>
inline F joined(F x, const Join& join, std::integer_sequence<int, L...> lanes) {
  x = join(x, SHUFFLE(x, x, (L ^ S)...));
  if constexpr (S > Last) return joined<S / 2, Last>(x, join, lanes);
  return x;
}

inline float greatest(F x) { return joined<LANES / 2>(x, greater, Lanes())[0]; }
inline float sum_of(F x) { return joined<LANES / 2>(x, sum, Lanes())[0]; }

// A head's real queries as int8, 127 of which are a query's largest number. Where that is far above
// the others, a second int8 says what the first one leaves, in 256ths.
inline void whole_numbers(const Score& s, int64_t head) {
  const int64_t half = s.dim / 2, heads = s.kv_heads * s.group;
  int64_t row = head * s.most_rows;
  auto values = reinterpret_cast<float*>(own_memory(4 * s.dim + 64));
  std::fill_n(values, s.dim + 16, 0.0f);
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t i = 0; i < s.length(b); ++i)
      for (int64_t g = 0; g < s.group; ++g, ++row) {
        const int64_t at = ((b * s.queries + i) * heads + head * s.group + g) * s.dim;
        for (int64_t d = 0; d < s.dim; ++d)
          values[d] = s.q_bfloat16 ? bfloat16(static_cast<const uint16_t*>(s.q)[at + d])
                                   : static_cast<const float*>(s.q)[at + d];
        F tops = {}, squares = {};
        for (int64_t v = 0; v * LANES < s.dim; ++v) {
          const F x = reinterpret_cast<const F*>(values)[v];
          tops = greater((F)((I)x & 0x7fffffff), tops), squares += x * x;
        }
        const float most = greatest(tops);
        const bool two = s.two[row] = most * most * s.dim > kFar * kFar * sum_of(squares);
        const float levels = two ? 127 * 256 : 127, inverse = most > 0 ? levels / most : 0.0f;
        for (int64_t d = 0; d < s.dim; ++d) values[d] = std::fma(values[d], inverse, kRounding);
        auto rounded = reinterpret_cast<const int32_t*>(values);
        auto numbers = reinterpret_cast<int8_t*>(s.numbers + row * half);
        int32_t up = two ? 8 : 0, sum = 0;
        for (int64_t d = 0; d < s.dim; d += 4) {
          const int64_t n = s.int4 ? d % half * 2 + d / half * 4 : d;
          for (int k = 0; k < 4; ++k) {
            const int32_t number = rounded[d + k] - 0x4b400000, high = (number + up * 16) >> up;
            numbers[n + k] = static_cast<int8_t>(high);
            numbers[s.dim + n + k] = static_cast<int8_t>(number - high * (1 << up));
            sum += number;
          }
        }
        s.base[row] = -(s.int4 ? 8 : kAbove) * sum;
        s.unit[row] = (most > 0 ? most / levels : 1.0f) * s.factor;
      }
  for (; row < (head + 1) * s.most_rows; ++row) {  // of no query
    std::fill_n(s.numbers + row * half, half, 0);
    s.base[row] = 0, s.unit[row] = 1, s.two[row] = 0;
  }
}

// The keys [tiles, D / 4, kTile] of a block of LANES chunks: vector j has token j of every chunk.
inline void unpack(const Score& s, int64_t head, int64_t block, I* keys, F* scale, F* bias) {
  const int64_t bytes = s.key_bytes(), quarter = s.dim / 4;
  const int64_t tiles = (s.chunk + kTile - 1) / kTile, first = block * LANES * s.chunk;
  const int64_t stride = s.heads_first ? 1 : s.kv_heads;
  const int64_t begin = s.heads_first ? head * s.tokens : head;
  for (int64_t j = 0; j < tiles * kTile; ++j) {
    const uint8_t* from[LANES];
    const bool all = j < s.chunk && first + LANES * s.chunk <= s.num_tokens;
    scale[j] = F{}, bias[j] = F{} - (all ? 0.0f : INFINITY);
    for (int l = 0; l < LANES; ++l) {
      const int64_t token = first + l * s.chunk + j;
      const bool real = all || (j < s.chunk && token < s.num_tokens);
      const int64_t at = begin + (real ? token : 0) * stride;
      from[l] = s.codes + at * bytes;
      if (real) scale[j][l] = s.scale[at], bias[j][l] = 0.0f;
    }
    I* to = keys + j / kTile * kTile * quarter + j % kTile;
    for (int64_t w = 0; w < bytes / 4; w += LANES) {
      const int64_t words = std::min<int64_t>(bytes / 4 - w, LANES);
      I x[LANES];
      for (int l = 0; l < LANES; ++l) x[l] = load(from[l] + 4 * w, words);
      transpose(x);
      for (int64_t i = 0; i < words; ++i) {
        if (s.int4)
          for (int shift : {0, 4}) *to = (x[i] >> shift) & 0x0f0f0f0f, to += kTile;
        else
          *to = x[i] ^ kAbove * 0x01010101, to += kTile;
      }
    }
  }
}

// Each chunk's sum of exponentials, for every row of a head, less the block's greatest logit.
inline void score_block(const Score& s, int64_t head, int64_t block) {
  const int64_t quarter = s.dim / 4, tiles = (s.chunk + kTile - 1) / kTile;
  const int64_t tokens = tiles * kTile;
  auto keys = reinterpret_cast<I*>(own_memory(sizeof(I) * tokens * (quarter + 2 + kTogether)));
  auto scale = reinterpret_cast<F*>(keys + tokens * quarter), bias = scale + tokens;
  F* logits = bias + tokens;
  unpack(s, head, block, keys, scale, bias);
  for (int64_t row = head * s.most_rows; row < (head + 1) * s.most_rows; row += kTogether) {
    const int32_t* two = s.two + row;
    const int parts = 1 + std::any_of(two, two + kTogether, [](int32_t own) { return own; });
    F top[kTogether];
    for (int r = 0; r < kTogether; ++r) top[r] = F{} - INFINITY;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      I sums[kTogether][kTile] = {};
      for (int part = 0; part < parts; ++part) {
        const I* key = keys + tile * kTile * quarter;
        const int32_t* numbers = s.numbers + 2 * row * quarter + part * quarter;
        for (int r = 0; r < kTogether; ++r)
          for (int j = 0; j < kTile; ++j) sums[r][j] <<= 8;
        for (int64_t i = 0; i < quarter; ++i, key += kTile)
          for (int r = 0; r < kTogether; ++r)
            for (int j = 0; j < kTile; ++j)
              sums[r][j] = dot(sums[r][j], key[j], I{} + numbers[2 * r * quarter + i], s.int4);
      }
      for (int r = 0; r < kTogether; ++r)
        for (int64_t j = tile * kTile, t = 0; t < kTile; ++j, ++t) {
          const I whole = sums[r][t] + (s.base[row + r] << (parts - 1 - two[r]) * 8);
          const F x = __builtin_convertvector(whole, F) * scale[j] + bias[j];
          logits[r * tokens + j] = x;
          top[r] = greater(x, top[r]);
        }
    }
    for (int r = 0; r < kTogether; ++r) {
      const float most = greatest(top[r]), unit = s.unit[row + r] / (parts - two[r] > 1 ? 256 : 1);
      const float base = most > -INFINITY ? most : 0.0f;
      F sum = {};
      for (int64_t j = 0; j < tokens; ++j)
        sum += power_of_2(logits[r * tokens + j] * unit - base * unit);
      std::memcpy(s.sums + ((row + r) * s.blocks + block) * LANES, &sum, sizeof(sum));
      float* tops = s.tops + (row + r) * s.most_blocks;
      tops[block] = most * unit;
      if (block == s.blocks - 1) std::fill(tops + s.blocks, tops + s.most_blocks, -INFINITY);
    }
  }
}

// The masses of one sequence over one KV head's chunks, of all its rows together.
inline void finish(const Score& s, int64_t b, int64_t head) {
  auto masses = reinterpret_cast<F*>(own_memory(sizeof(F) * 2 * s.blocks + 4 * s.most_blocks));
  F* squares = masses + s.blocks;
  auto weights = reinterpret_cast<F*>(squares + s.blocks);
  auto weight = reinterpret_cast<const float*>(weights);
  for (int64_t i = 0; i < 2 * s.blocks; ++i) masses[i] = F{};
  int64_t row = head * s.most_rows;
  for (int64_t before = 0; before < b; ++before) row += s.group * s.length(before);
  for (int64_t i = 0; i < s.length(b); ++i)
    for (int64_t g = 0; g < s.group; ++g, ++row) {
      auto tops = reinterpret_cast<const F*>(s.tops + row * s.most_blocks);
      auto sums = reinterpret_cast<const F*>(s.sums) + row * s.blocks;
      const int64_t vectors = s.most_blocks / LANES;
      F most = tops[0], total = {};
      for (int64_t at = 1; at < vectors; ++at) most = greater(most, tops[at]);
      const float top = greatest(most);
      if (!(top > -INFINITY)) continue;
      for (int64_t at = 0; at < vectors; ++at) weights[at] = power_of_2(tops[at] - top);
      for (int64_t at = 0; at < s.blocks; ++at) total += sums[at] * weight[at];
      const float share = 1.0f / (sum_of(total) * (s.peaks ? static_cast<float>(s.lengths[b] - i) : 1));
      for (int64_t at = 0; at < s.blocks; ++at) {
        const F mass = sums[at] * (weight[at] * share);
        masses[at] += mass, squares[at] += mass * mass;
      }
    }
  const int64_t of_all = s.batch * s.kv_heads * s.chunks;
  float* out = s.out + (b * s.kv_heads + head) * s.chunks;
  std::memcpy(out, masses, 4 * s.chunks);
  if (s.peaks) std::memcpy(out + of_all, squares, 4 * s.chunks);
}

// Products go over kWide outputs and kTall rows at a time, as the registers hold their sums.
constexpr int kWide = LANES == 16 ? 4 : 2;
#if defined(BFLOAT16)
constexpr int kTall = 6;
using Number = uint16_t;
#else
constexpr int kTall = 4;
using Number = float;
#endif

// int8 from memory as float32.
inline F widened(const char* from) {
#if defined(AVX512)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(AVX2)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  F found;
  for (int l = 0; l < LANES; ++l) found[l] = static_cast<int8_t>(from[l]);
  return found;
#endif
}

// Weights of int8 as bfloat16, which they are exactly: 2 * LANES in their order for products of
// bfloat16, else the first LANES in the lower halves of 32 bits, the others in the upper ones.
inline void widen(const char* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    __builtin_prefetch(from + i + kAhead);
    const F a = widened(from + i), b = widened(from + i + LANES);
#if defined(BFLOAT16)
    const auto both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    const U both = (U)a >> 16 | ((U)b & 0xffff0000);
#endif
    std::memcpy(to + i, &both, sizeof(both));
  }
}

// The sums of kWide vectors, of vector k in lane k.
template <int S = 1>
inline F sums_of(F* x) {
  if constexpr (S == kWide) return joined<LANES / 2, kWide>(x[0], sum, Lanes());
  for (int k = 0; k + S < kWide; k += 2 * S) {
    exchange<S>((I&)x[k], (I&)x[k + S], Lanes());
    x[k] += x[k + S];
  }
  return sums_of<S < kWide ? 2 * S : S>(x);
}

// R rows from `row` on times the weights of kWide outputs from o on; fetches what lies at `next`.
template <int R>
inline void multiply(const Product& p, int64_t row, int64_t o, const uint16_t* weight, const char* next) {
  const Number* x = static_cast<const Number*>(p.x) + row * p.inputs;
  F sums[R][kWide] = {};
  for (int64_t i = 0; i < p.inputs; i += 2 * LANES) {
    I pairs[kWide];
    for (int k = 0; k < kWide; ++k) {
      if (p.bytes == 2) __builtin_prefetch(next + 2 * (k * p.inputs + i));
      std::memcpy(&pairs[k], weight + k * p.inputs + i, sizeof(I));
    }
    for (int r = 0; r < R; ++r) {
      auto own = reinterpret_cast<const Packed*>(x + r * p.inputs + i);
      for (int k = 0; k < kWide; ++k) {
#if defined(BFLOAT16)
        sums[r][k] = (F)_mm512_dpbf16_ps((__m512)sums[r][k], (__m512bh)pairs[k], (__m512bh)*own);
#else
        sums[r][k] += own[0] * (F)(pairs[k] << 16);
        sums[r][k] += own[1] * (F)(pairs[k] & ~0xffff);
#endif
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    const F all = sums_of(sums[r]);
    for (int k = 0; k < kWide; ++k)
      p.out[(row + r) * p.outputs + o + k] = p.bytes == 1 ? all[k] * p.scale[o + k] : all[k];
  }
}

template <int R = 1, typename... Rest>
inline void rows(int64_t count, const Rest&... rest) {
  if constexpr (R < kTall)
    if (R < count) return rows<R + 1>(count, rest...);
  multiply<R>(rest...);
}

// Outputs from `first` to `last`.
inline void product(const Product& p, int64_t first, int64_t last) {
  const int64_t parts = (p.rows + kTall - 1) / kTall, size = kWide * p.inputs;
  auto wide = reinterpret_cast<uint16_t*>(own_memory(p.bytes == 1 ? 2 * size : 0));
  for (int64_t at = first; at < last; at += kWide) {
    const int64_t o = std::min(at, p.outputs - kWide);  // the last ones once more, to be whole
    const char *from = p.weight + o * p.inputs * p.bytes, *next = from + 2 * size;
    if (p.bytes == 1) widen(from, size, wide);
    auto weight = p.bytes == 1 ? wide : reinterpret_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < parts; ++i, next = from) {
      const int64_t row = i * p.rows / parts;
      rows((i + 1) * p.rows / parts - row, p, row, o, weight, next);
    }
  }
}

#undef LANES
#undef AVX2
