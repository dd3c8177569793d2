// One level of instructions: vectors of LANES 32-bit numbers. See `kernels.cc`.

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int16_t H __attribute__((vector_size(4 * LANES)));
using Lanes = std::make_integer_sequence<int, LANES>;
constexpr int64_t kTile = LANES == 16 ? 4 : 2;  // key vectors that a few rows go over at once

// acc + the products of each lane's four nibbles, a byte each, and four int8.
inline I dot(I acc, I a, I b) {
#if defined(AVX512)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(AVX2)
  const auto pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
  return acc + (I)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  const H low = ((H)a & 0xff) * ((H)b << 8 >> 8), high = ((H)a >> 8) * ((H)b >> 8);
  const I pairs = (I)(low + high);
  return acc + (pairs << 16 >> 16) + (pairs >> 16);
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
  I x = {};
  if (words >= LANES) std::memcpy(&x, from, sizeof(I));
  else std::memcpy(&x, from, 4 * words);
  return x;
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

// acc + the products of each lane's two bfloat16.
inline F dot_pairs(F acc, I a, I b) {
#if defined(BFLOAT16)
  return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc += (F)(a << 16) * (F)(b << 16);
  return acc + (F)(a & ~0xffff) * (F)(b & ~0xffff);
#endif
}

// LANES numbers, `step` numbers apart.
inline F spread(const float* from, int64_t step) {
#if defined(AVX512)
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (F)_mm512_i32gather_ps((__m512i)(lane * (int32_t)step), from, 4);
#elif defined(AVX2)
  const I lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (F)_mm256_i32gather_ps(from, (__m256i)(lane * (int32_t)step), 4);
#else
  F x;
  for (int l = 0; l < LANES; ++l) x[l] = from[l * step];
  return x;
#endif
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
          values[d] = s.q[at + d];
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
          const int64_t n = s.few ? d : d % half * 2 + d / half * 4;
          for (int k = 0; k < 4; ++k) {
            const int32_t number = rounded[d + k] - 0x4b400000, high = (number + up * 16) >> up;
            numbers[n + k] = static_cast<int8_t>(high);
            numbers[s.dim + n + k] = static_cast<int8_t>(number - high * (1 << up));
            sum += number;
          }
        }
        s.base[row] = -8 * sum;
        s.unit[row] = (most > 0 ? most / levels : 1.0f) * s.factor;
      }
  for (; row < (head + 1) * s.most_rows; ++row) {  // of no query
    std::fill_n(s.numbers + row * half, half, 0);
    s.base[row] = 0, s.unit[row] = 1, s.two[row] = 0;
  }
}

// Fetches bytes past the first level: chunks at a distance share a few of its sets.
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t next = 0; next < bytes; next += 64) __builtin_prefetch(from + next, 0, 1);
}

// Where token j of each of a block's LANES chunks lies, its scale, and -infinity for one past the
// end.
inline void locate(const Score& s, int64_t head, int64_t block, int64_t j, const uint8_t** from,
                   F& scale, F& bias) {
  const int64_t stride = s.kv_heads, step = s.chunk * stride, bytes = s.dim / 2;
  const int64_t first = block * LANES;
  const bool all = j < s.chunk && (first + LANES - 1) * s.chunk + j < s.num_tokens;
  if (all && !s.ids) {
    const int64_t at = head + first * step + j * stride;
    for (int l = 0; l < LANES; ++l) {
      from[l] = s.codes + (at + l * step) * bytes;
      fetch(from[l] + LANES * step * bytes, bytes);  // of the block behind
    }
    scale = spread(s.scale + at, step), bias = F{};
    return;
  }
  const auto place = [&](int64_t chunk) {
    return head + (s.ids ? std::max(s.ids[chunk], 0) : chunk) * step + j * stride;
  };
  scale = F{}, bias = F{} - INFINITY;
  for (int l = 0; l < LANES; ++l) {
    const int64_t chunk = first + l;
    const bool real = j < s.chunk && chunk * s.chunk + j < s.num_tokens;
    const int64_t at = real ? place(chunk) : head;
    from[l] = s.codes + at * bytes;
    if (real) scale[l] = s.scale[at], bias[l] = 0.0f;
    if (s.ids && chunk + LANES < s.chunks)
      fetch(s.codes + place(chunk + LANES) * bytes, bytes);
  }
}

// The keys [tiles, D / 4, kTile] of a block of LANES chunks: vector j has token j of every chunk.
inline void unpack(const Score& s, int64_t head, int64_t block, I* keys, F* scale, F* bias) {
  const int64_t quarter = s.dim / 4, words = quarter / 2;
  for (int64_t j = 0; j < (s.chunk + kTile - 1) / kTile * kTile; ++j) {
    const uint8_t* from[LANES];
    locate(s, head, block, j, from, scale[j], bias[j]);
    I* to = keys + j / kTile * kTile * quarter + j % kTile;
    for (int64_t w = 0; w < words; w += LANES) {
      const int64_t here = std::min<int64_t>(words - w, LANES);
      I x[LANES];
      for (int l = 0; l < LANES; ++l) x[l] = load(from[l] + 4 * w, here);
      transpose(x);
      for (int64_t i = 0; i < here; ++i)
        for (int shift : {0, 4}) *to = (x[i] >> shift) & 0x0f0f0f0f, to += kTile;
    }
  }
}

// The logits [rows, tokens] of kTogether rows with a block's keys, without the rows' units.
inline void multiply_keys(const Score& s, int64_t row, int64_t parts, int64_t tokens, const I* keys,
                          const F* scale, const F* bias, F* logits) {
  const int64_t quarter = s.dim / 4;
  for (int64_t tile = 0; tile < tokens / kTile; ++tile) {
    I sums[kTogether][kTile] = {};
    for (int part = 0; part < parts; ++part) {
      const I* key = keys + tile * kTile * quarter;
      const int32_t* numbers = s.numbers + 2 * row * quarter + part * quarter;
      for (int r = 0; r < kTogether; ++r)
        for (int j = 0; j < kTile; ++j) sums[r][j] <<= 8;
      for (int64_t i = 0; i < quarter; ++i, key += kTile)
        for (int r = 0; r < kTogether; ++r)
          for (int j = 0; j < kTile; ++j)
            sums[r][j] = dot(sums[r][j], key[j], I{} + numbers[2 * r * quarter + i]);
    }
    for (int r = 0; r < kTogether; ++r)
      for (int64_t j = tile * kTile, t = 0; t < kTile; ++j, ++t) {
        const I whole = sums[r][t] + (s.base[row + r] << (parts - 1 - s.two[row + r]) * 8);
        logits[r * tokens + j] = __builtin_convertvector(whole, F) * scale[j] + bias[j];
      }
  }
}

#if defined(AVX512)
// Four vectors' sums by quarters: number 4 q + i is of quarter q of vector i. Sums of two numbers
// fit int16.
inline I sums_of_four(const I* x) {
  const auto pairs = [](I a, I b) {
    const auto both = _mm512_packs_epi32((__m512i)a, (__m512i)b);
    return (I)_mm512_madd_epi16(both, _mm512_set1_epi16(1));
  };
  return pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
}

// The sums of four such vectors' quarters, of vector l in lane l.
inline I sums_of_quarters(I* x) {
  for (int i = 0; i < 4; i += 2) exchange<4>(x[i], x[i + 1], Lanes()), x[i] += x[i + 1];
  exchange<8>(x[0], x[2], Lanes());
  return x[0] + x[2];
}

// `multiply_keys` of few rows and keys within one vector, for token j of a block: each key is
// multiplied in place, as transposing a block takes longer than so few products.
inline void multiply_few(const Score& s, int64_t head, int64_t block, int64_t j, int64_t parts,
                         int64_t tokens, F* logits) {
  const int64_t row = head * s.most_rows, quarter = s.dim / 4, words = quarter / 2;
  const uint8_t* from[LANES];
  F scale, bias;
  locate(s, head, block, j, from, scale, bias);
  I sums[2 * kTogether][4];
  for (int four = 0; four < 4; ++four) {
    I low[4], high[4], x[4];
    for (int l = 0; l < 4; ++l) {
      const I codes = load(from[4 * four + l], words);
      low[l] = codes & 0x0f0f0f0f, high[l] = (codes >> 4) & 0x0f0f0f0f;
    }
    for (int64_t r = 0; r < s.rows; ++r)
      for (int64_t part = 0; part < parts; ++part) {
        const int32_t* own = s.numbers + (2 * (row + r) + part) * quarter;
        const I first = load(own, words), second = load(own + words, words);
        for (int l = 0; l < 4; ++l) x[l] = dot(dot(I{}, low[l], first), high[l], second);
        sums[2 * r + part][four] = sums_of_four(x);
      }
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    I whole = {};
    for (int64_t part = 0; part < parts; ++part)
      whole = (whole << 8) + sums_of_quarters(sums[2 * r + part]);
    whole += s.base[row + r] << (parts - 1 - s.two[row + r]) * 8;
    logits[r * tokens + j] = __builtin_convertvector(whole, F) * scale + bias;
  }
}
#endif

inline int64_t parts_of(const Score& s, int64_t row) {
  const int32_t* two = s.two + row;
  return 1 + std::any_of(two, two + kTogether, [](int32_t own) { return own; });
}

// A row's sums of exponentials of a block's chunks, less the greatest of their logits [tokens].
inline void exponentials(const Score& s, int64_t row, int64_t block, int64_t parts, int64_t tokens,
                         const F* logits) {
  F top = F{} - INFINITY;
  for (int64_t j = 0; j < tokens; ++j) top = greater(logits[j], top);
  const float most = greatest(top), unit = s.unit[row] / (parts - s.two[row] > 1 ? 256 : 1);
  const float base = most > -INFINITY ? most : 0.0f;
  F sum = {};
  for (int64_t j = 0; j < tokens; ++j) sum += power_of_2(logits[j] * unit - base * unit);
  std::memcpy(s.sums + (row * s.blocks + block) * LANES, &sum, sizeof(sum));
  float* tops = s.tops + row * s.most_blocks;
  tops[block] = most * unit;
  if (block == s.blocks - 1) std::fill(tops + s.blocks, tops + s.most_blocks, -INFINITY);
}

// Each chunk's sum of exponentials, for every row, less the block's greatest logit.
inline void score_block(const Score& s, int64_t block) {
  const int64_t quarter = s.dim / 4, tokens = (s.chunk + kTile - 1) / kTile * kTile;
#if defined(AVX512)
  if (s.few) {  // all heads of a token lie together
    const int64_t heads = s.kv_heads;
    auto logits = reinterpret_cast<F*>(own_memory((sizeof(F) * tokens * kTogether + 4) * heads));
    auto parts = reinterpret_cast<int32_t*>(logits + tokens * kTogether * heads);
    for (int64_t head = 0; head < heads; ++head) parts[head] = parts_of(s, head * s.most_rows);
    for (int64_t j = 0; j < tokens; ++j)
      for (int64_t head = 0; head < heads; ++head)
        multiply_few(s, head, block, j, parts[head], tokens,
                     logits + head * kTogether * tokens);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t r = 0, row = head * s.most_rows; r < s.rows; ++r)
        exponentials(s, row + r, block, parts[head], tokens,
                     logits + (head * kTogether + r) * tokens);
    return;
  }
#endif
  auto keys = reinterpret_cast<I*>(own_memory(sizeof(I) * tokens * (quarter + 2 + kTogether)));
  auto scale = reinterpret_cast<F*>(keys + tokens * quarter), bias = scale + tokens;
  F* logits = bias + tokens;
  for (int64_t head = 0; head < s.kv_heads; ++head) {
    unpack(s, head, block, keys, scale, bias);
    for (int64_t row = head * s.most_rows; row < (head + 1) * s.most_rows; row += kTogether) {
      const int64_t parts = parts_of(s, row);
      multiply_keys(s, row, parts, tokens, keys, scale, bias, logits);
      for (int r = 0; r < kTogether; ++r)
        exponentials(s, row + r, block, parts, tokens, logits + r * tokens);
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
#else
constexpr int kTall = 4;
#endif

// Two bytes in each lane's lower half, with its sign above.
inline I pairs_of_bytes(const void* from) {
#if defined(AVX512)
  return (I)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)from));
#elif defined(AVX2)
  return (I)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  int16_t both[LANES];
  std::memcpy(both, from, sizeof(both));
  I x;
  for (int l = 0; l < LANES; ++l) x[l] = both[l];
  return x;
#endif
}

// Weights of int8 as bfloat16, which they are exactly.
inline void widen(const int8_t* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    __builtin_prefetch(from + i + kAhead);
    const I both = pairs_of_bytes(from + i);
    const F even = __builtin_convertvector(both << 24 >> 24, F);
    const U odd = (U)__builtin_convertvector(both >> 8, F), pairs = (U)even >> 16 | (odd & ~0xffff);
    std::memcpy(to + i, &pairs, sizeof(U));
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
inline void multiply(const Product& p, int64_t row, int64_t o, const uint16_t* weight,
                     const char* next) {
  F sums[R][kWide] = {};
  for (int64_t i = 0; i < p.inputs; i += 2 * LANES) {
    I pairs[kWide];
    for (int k = 0; k < kWide; ++k) {
      if (p.bytes == 2) __builtin_prefetch(next + 2 * (k * p.inputs + i));
      std::memcpy(&pairs[k], weight + k * p.inputs + i, sizeof(I));
    }
    for (int r = 0; r < R; ++r) {
      I x;
      std::memcpy(&x, p.x + (row + r) * p.inputs + i, sizeof(I));
      for (int k = 0; k < kWide; ++k) sums[r][k] = dot_pairs(sums[r][k], pairs[k], x);
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
    if (p.bytes == 1) widen(reinterpret_cast<const int8_t*>(from), size, wide);
    auto weight = p.bytes == 1 ? wide : reinterpret_cast<const uint16_t*>(from);
    for (int64_t i = 0; i < parts; ++i, next = from) {
      const int64_t row = i * p.rows / parts;
      rows((i + 1) * p.rows / parts - row, p, row, o, weight, next);
    }
  }
}

// The sums [O][R] of `steps` pairs: R vectors of rows, times O numbers, `along` words apart.
template <int O, int R>
inline void panel(const I* rows, const int32_t* const* numbers, int64_t along, int64_t steps,
                  F (&out)[O][R]) {
  F sums[O][R] = {};
  for (int64_t i = 0; i < steps; ++i, rows += R)
    for (int k = 0; k < O; ++k)
      for (int r = 0; r < R; ++r)
        sums[k][r] = dot_pairs(sums[k][r], rows[r], I{} + numbers[k][i * along]);
  std::memcpy(out, sums, sizeof(sums));
}

// LANES rows of pairs, one in each lane, as `words` vectors that lie `step` apart.
inline void pack(const uint16_t* const* rows, int64_t words, int64_t step, I* to) {
  for (int64_t w = 0; w < words; w += LANES) {
    I x[LANES];
    for (int l = 0; l < LANES; ++l) x[l] = load(rows[l] + 2 * w, words - w);
    transpose(x);
    for (int64_t i = 0; i < std::min<int64_t>(LANES, words - w); ++i) to[(w + i) * step] = x[i];
  }
}

// A panel's rows of `Product`: one in each lane.
inline void pack_panel(const Product& p, int64_t panel) {
  const int64_t words = p.inputs / 2, first = panel * kPanel * LANES;
  const int64_t vectors = std::min<int64_t>(kPanel, (p.rows - first + LANES - 1) / LANES);
  I* to = reinterpret_cast<I*>(p.packed) + panel * kPanel * words;
  for (int64_t v = 0; v < vectors; ++v) {
    const uint16_t* rows[LANES];
    for (int l = 0; l < LANES; ++l)
      rows[l] = p.x + std::min(first + v * LANES + l, p.rows - 1) * p.inputs;
    pack(rows, words, vectors, to + v);
  }
}

// The rows of R vectors from `row` on times the weights of LANES outputs from o on.
template <int R>
inline void multiply_panel(const Product& p, int64_t row, int64_t o, const uint16_t* weight) {
  constexpr int half = LANES / 2;
  const I* rows = reinterpret_cast<const I*>(p.packed) + row / LANES * (p.inputs / 2);
  F sums[LANES][R];
  for (int k = 0; k < LANES; k += half) {
    const int32_t* numbers[half];
    for (int i = 0; i < half; ++i)
      numbers[i] = reinterpret_cast<const int32_t*>(weight + (k + i) * p.inputs);
    panel(rows, numbers, 1, p.inputs / 2, reinterpret_cast<F(&)[half][R]>(sums[k]));
  }
  F scale;
  if (p.bytes == 1) std::memcpy(&scale, p.scale + o, sizeof(F));
  for (int r = 0; r < R; ++r) {
    I out[LANES];
    for (int k = 0; k < LANES; ++k) out[k] = (I)sums[k][r];
    transpose(out);
    for (int64_t l = 0, at = row + r * LANES; l < LANES && at < p.rows; ++l, ++at) {
      const F x = p.bytes == 1 ? (F)out[l] * scale : (F)out[l];
      std::memcpy(p.out + at * p.outputs + o, &x, sizeof(F));
    }
  }
}

// `product` of many rows, which `pack_panel` has packed.
inline void product_of_many(const Product& p, int64_t first, int64_t last) {
  const int64_t size = LANES * p.inputs;
  auto wide = reinterpret_cast<uint16_t*>(own_memory(p.bytes == 1 ? 2 * size : 0));
  for (int64_t at = first; at < last; at += LANES) {
    const int64_t o = std::min(at, p.outputs - LANES);  // the last ones once more, to be whole
    const char* from = p.weight + o * p.inputs * p.bytes;
    if (p.bytes == 1) widen(reinterpret_cast<const int8_t*>(from), size, wide);
    else for (int64_t i = 2 * size; i < 4 * size; i += 64) __builtin_prefetch(from + i, 0, 2);
    auto weight = p.bytes == 1 ? wide : reinterpret_cast<const uint16_t*>(from);
    for (int64_t row = 0; row < p.rows; row += kPanel * LANES)
      if (p.rows - row > LANES) multiply_panel<kPanel>(p, row, o, weight);
      else multiply_panel<1>(p, row, o, weight);
  }
}

// Query rows of one sequence and KV head, R vectors of them with a row in each lane, over all tokens
// that they see, kBlock at a time.
template <int R>
inline void attend_panel(const Attend& a, int64_t b, int64_t head, int64_t first) {
  constexpr int half = LANES / 2;
  const int64_t width = a.kv_heads * a.dim, words = a.dim / 2, group = a.heads / a.kv_heads;
  const int64_t rows = a.queries * group;
  auto q = reinterpret_cast<I*>(
      own_memory(sizeof(I) * (words * R + kBlock * R + a.dim * R) + 4 * kBlock / 2 * a.dim));
  F *logits = reinterpret_cast<F*>(q + words * R), *out = logits + kBlock * R;
  auto pairs = reinterpret_cast<int32_t*>(out + a.dim * R);
  const uint16_t *keys[kBlock], *values[kBlock];
  int32_t places[kBlock];  // of a new token in its sequence; the least number: of a page
  I last[R];
  F top[R], total[R] = {};
  for (int r = 0; r < R; ++r) {
    const uint16_t* from[LANES];
    for (int l = 0; l < LANES; ++l) {
      const int64_t row = std::min(first + r * LANES + l, rows - 1), i = row / group;
      from[l] = a.q + ((b * a.queries + i) * a.heads + head * group + row % group) * a.dim;
      last[r][l] = a.start[b] + i;
    }
    pack(from, words, R, q + r), top[r] = F{} - INFINITY;
  }
  std::fill_n(out, a.dim * R, F{});
  int64_t count = 0;
  auto attend = [&] {
    const int64_t whole = (count + half - 1) / half * half;
    for (int64_t t = count; t < whole; ++t)
      keys[t] = keys[0], values[t] = values[0], places[t] = INT32_MAX;
    F most[R], less[R], scale[R];
    for (int r = 0; r < R; ++r) most[r] = top[r];
    for (int64_t t = 0; t < whole; t += half) {
      const int32_t* numbers[half];
      for (int k = 0; k < half; ++k)
        numbers[k] = reinterpret_cast<const int32_t*>(keys[t + k] + head * a.dim);
      F sums[half][R];
      panel(q, numbers, 1, words, sums);
      for (int k = 0; k < half; ++k)
        for (int r = 0; r < R; ++r) {
          const F seen = places[t + k] > last[r] ? F{} - INFINITY : sums[k][r];
          most[r] = greater(seen, most[r]), logits[(t + k) * R + r] = seen;
        }
    }
    for (int r = 0; r < R; ++r) {
      less[r] = (most[r] > -INFINITY ? most[r] : F{}) * a.factor;
      // 1 where the greatest logit stays: a difference of products is not, by one rounding
      scale[r] = power_of_2((top[r] - (most[r] > -INFINITY ? most[r] : F{})) * a.factor);
      top[r] = most[r], total[r] *= scale[r];
    }
    for (int64_t t = 0; t < whole; t += 2)
      for (int r = 0; r < R; ++r) {  // weights of two tokens, as pairs of bfloat16
        const F low = power_of_2(logits[t * R + r] * a.factor - less[r]);
        const F high = power_of_2(logits[(t + 1) * R + r] * a.factor - less[r]);
        total[r] += low + high;
        logits[t / 2 * R + r] = (F)(((U)low + 0x8000) >> 16 | (((U)high + 0x8000) & ~0xffff));
      }
    for (int64_t t = 0; t < whole; t += 2)  // values of two tokens: even dims, then odd ones
      for (int64_t w = 0; w < words; w += LANES) {
        const I low = load(values[t] + head * a.dim + 2 * w, words - w);
        const I high = load(values[t + 1] + head * a.dim + 2 * w, words - w);
        const I even = (low & 0xffff) | high << 16, odd = (I)((U)low >> 16) | (high & ~0xffff);
        int32_t* to = pairs + t / 2 * a.dim + w;
        const size_t bytes = 4 * std::min<int64_t>(LANES, words - w);
        std::memcpy(to, &even, bytes), std::memcpy(to + words, &odd, bytes);
      }
    for (int64_t d = 0; d < a.dim; d += half) {
      const int32_t* numbers[half];
      for (int k = 0; k < half; ++k) numbers[k] = pairs + d + k;
      F sums[half][R];
      panel(reinterpret_cast<const I*>(logits), numbers, a.dim, whole / 2, sums);
      for (int k = 0; k < half; ++k)
        for (int r = 0; r < R; ++r) {
          F& one = out[(d + k) * R + r];
          one = one * scale[r] + sums[k][r];
        }
    }
    count = 0;
  };
  auto add = [&](const uint16_t* key, const uint16_t* value, int64_t n, int64_t place, int step) {
    for (; n > 0; --n, key += width, value += width, place += step) {
      keys[count] = key, values[count] = value, places[count] = place;
      for (int64_t d = head * a.dim; d < (head + 1) * a.dim; d += 32)
        __builtin_prefetch(key + d, 0, 2), __builtin_prefetch(value + d, 0, 2);
      if (++count == kBlock) attend();
    }
  };
  for (int64_t at = b * a.entries; at < (b + 1) * a.entries; ++at) {
    const int64_t k = a.k_table[at], v = a.v_table[at];
    if (std::min(k, v) >= 0 && std::max(k, v) < a.num_pages)
      add(a.pages + k * a.chunk * width, a.pages + v * a.chunk * width,
          std::min<int64_t>(a.lengths[at], a.chunk), INT32_MIN, 0);
  }
  const int64_t seen = a.start[b] + (std::min(first + R * LANES, rows) - 1) / group + 1;
  add(a.k_new + b * a.new_tokens * width, a.v_new + b * a.new_tokens * width,
      std::min(a.new_tokens, seen), 0, 1);
  if (count) attend();
  for (int r = 0; r < R; ++r) {
    const F share = total[r] > 0.0f ? 1.0f / total[r] : F{};
    for (int64_t w = 0; w < words; w += LANES) {
      const int64_t here = std::min<int64_t>(LANES, words - w);
      I x[LANES] = {};
      for (int64_t i = 0; i < here; ++i) {
        U bits[2];
        for (int odd = 0; odd < 2; ++odd) {
          bits[odd] = (U)(out[(w + i + odd * words) * R + r] * share);
          bits[odd] += 0x7fff + (bits[odd] >> 16 & 1);
        }
        x[i] = (I)(bits[0] >> 16 | (bits[1] & ~0xffffu));
      }
      transpose(x);
      for (int64_t l = 0, row = first + r * LANES; l < LANES && row < rows; ++l, ++row) {
        const int64_t at = (b * a.queries + row / group) * a.heads + head * group + row % group;
        std::memcpy(a.out + at * a.dim + 2 * w, &x[l], 4 * here);
        if (w == 0)
          a.lse[at] = total[r][l] > 0 ? top[r][l] * a.factor * kLog2 + std::log(total[r][l])
                                      : -INFINITY;
      }
    }
  }
}

inline void attend_rows(const Attend& a, int64_t b, int64_t head, int64_t panel) {
  const int64_t first = panel * kPanel * LANES, rows = a.queries * (a.heads / a.kv_heads);
  if (rows - first > LANES) attend_panel<kPanel>(a, b, head, first);
  else attend_panel<1>(a, b, head, first);
}

// One sequence's query over one block of tokens, of every head: see `Attend`.
inline void attend_block(const Attend& a, int64_t b, int64_t block) {
  const int64_t width = a.kv_heads * a.dim, words = a.dim / 2, group = a.heads / a.kv_heads;
  const int64_t most = (a.block_tokens / LANES + 3) * LANES;
  const int64_t rows = (group + kTogether - 1) / kTogether * kTogether;
  auto turned = reinterpret_cast<I*>(
      own_memory(sizeof(I) * (words + LANES) + (16 + 4 * rows) * most + 4 * rows * words));
  auto logits = reinterpret_cast<float*>(turned + words + LANES);
  auto q = reinterpret_cast<int32_t*>(logits + rows * most);
  auto keys = reinterpret_cast<const uint16_t**>(q + rows * words), values = keys + most;
  std::fill_n(q + group * words, (rows - group) * words, 0);
  int64_t count = 0;
  auto add = [&](const uint16_t* key, const uint16_t* value, int64_t n) {
    for (int64_t i = 0; i < n * width; i += 32) __builtin_prefetch(key + i);
    for (; n > 0; --n, key += width, value += width) keys[count] = key, values[count++] = value;
  };
  const int64_t per = a.block_tokens / a.chunk, first = (block - a.page_blocks) * a.block_tokens;
  for (int64_t n = block * per; n < std::min(a.entries, (block + 1) * per); ++n) {
    const int64_t at = b * a.entries + n, k = a.k_table[at], v = a.v_table[at];
    if (std::min(k, v) >= 0 && std::max(k, v) < a.num_pages)
      add(a.pages + k * a.chunk * width, a.pages + v * a.chunk * width,
          std::min<int64_t>(a.lengths[at], a.chunk));
  }
  const int64_t seen = std::min(a.new_tokens, int64_t{a.start[b]} + 1);
  const int64_t at = (b * a.new_tokens + first) * width;
  if (first >= 0) add(a.k_new + at, a.v_new + at, std::min(seen - first, a.block_tokens));
  const int64_t vectors = (count + 2 * LANES - 1) / (2 * LANES) * 2;
  for (int64_t t = count; t < vectors * LANES; ++t) keys[t] = keys[0], values[t] = values[0];
  for (int64_t head = 0; head < a.kv_heads; ++head) {
    float* part = a.part(b, block, head * group);
    std::memcpy(q, a.q + (b * a.heads + head * group) * a.dim, 2 * group * a.dim);
    for (int64_t v = 0; v < vectors; ++v) {
      for (int64_t w = 0; w < words; w += LANES) {
        for (int l = 0; l < LANES; ++l) {
          turned[w + l] = load(keys[v * LANES + l] + head * a.dim + 2 * w, words - w);
          __builtin_prefetch(values[v * LANES + l] + head * a.dim + 2 * w);
        }
        transpose(turned + w);
      }
      for (int64_t row = 0; row < group; row += kTogether) {
        F sums[kTogether][2] = {};
        for (int64_t w = 0; w < words; w += 2)
          for (int r = 0; r < kTogether; ++r)
            for (int i = 0; i < 2; ++i)
              sums[r][i] = dot_pairs(sums[r][i], turned[w + i], I{} + q[(row + r) * words + w + i]);
        for (int r = 0; r < kTogether; ++r)
          reinterpret_cast<F*>(logits + (row + r) * most)[v] = sums[r][0] + sums[r][1];
      }
    }
    for (int64_t row = 0; row < group; ++row, part += a.stride) {
      auto own = reinterpret_cast<F*>(logits + row * most);
      std::fill(logits + row * most + count, logits + row * most + vectors * LANES, -INFINITY);
      F top = F{} - INFINITY, total = {};
      for (int64_t v = 0; v < vectors; ++v) top = greater(own[v], top);
      const float base = part[0] = greatest(top) * a.factor;
      for (int64_t v = 0; v < vectors; v += 2) {  // weights of two vectors, as pairs of bfloat16
        const F low = power_of_2(own[v] * a.factor - base);
        const F high = power_of_2(own[v + 1] * a.factor - base);
        total += low + high;
        own[v / 2] = (F)(((U)low + 0x8000) >> 16 | (((U)high + 0x8000) & ~0xffff));
      }
      part[1] = sum_of(total);
    }
    part = a.part(b, block, head * group) + 2;
    for (int64_t w = 0; w < words; w += LANES)
      for (int64_t row = 0; row < group; row += kTogether) {
        auto weights = reinterpret_cast<const int32_t*>(logits + row * most);
        F sums[kTogether][2] = {};
        for (int64_t t = 0; t < vectors * LANES / 2; ++t) {
          const auto* from = values + t + t / LANES * LANES;
          const I low = load(from[0] + head * a.dim + 2 * w, words - w);
          const I high = load(from[LANES] + head * a.dim + 2 * w, words - w);
          const I even = (low & 0xffff) | high << 16, odd = (I)((U)low >> 16) | (high & ~0xffff);
          for (int r = 0; r < kTogether; ++r) {
            sums[r][0] = dot_pairs(sums[r][0], even, I{} + weights[r * most + t]);
            sums[r][1] = dot_pairs(sums[r][1], odd, I{} + weights[r * most + t]);
          }
        }
        for (int r = 0; r < std::min<int64_t>(kTogether, group - row); ++r)
          std::memcpy(part + (row + r) * a.stride + 2 * w, sums[r], sizeof(sums[r]));
      }
  }
}

// Numbers of 8 bits of each lane, from bit S on and 8 bits above, times scale and more, as bfloat16.
template <int S>
inline void store_pairs(I both, int32_t mask, F scale, F zero, uint16_t* to) {
  U bits[2];
  for (int k = 0; k < 2; ++k) {
    const I codes = (both >> (S + 8 * k)) & mask;
    bits[k] = (U)(__builtin_convertvector(codes, F) * scale + zero);
    bits[k] += 0x7fff + (bits[k] >> 16 & 1);
  }
  bits[0] = bits[0] >> 16 | (bits[1] & ~0xffffu);
  std::memcpy(to, bits, sizeof(U));
}

// One pack's rows of codes of 8 or 4 bits, with a scale and a zero each: see `storage/codec.py`.
inline void decode(const Packs& p, const uint8_t* stored, uint16_t* to) {
  auto both = reinterpret_cast<const uint16_t*>(stored);
  const uint8_t* from = stored + 4 * p.parts * p.rows;
  for (int64_t part = 0; part < p.parts; ++part) {
    const bool nibbles = p.nibbles[part % p.kinds];
    const int64_t bytes = nibbles ? p.dim / 2 : p.dim;
    for (int64_t row = 0; row < p.rows; ++row, both += 2, from += bytes, to += p.dim) {
      const F scale = F{} + bfloat16(both[0]), zero = F{} + bfloat16(both[1]);
      for (int64_t d = 0; d < bytes; d += 2 * LANES) {
        const I codes = pairs_of_bytes(from + d);
        store_pairs<0>(codes, nibbles ? 15 : 255, scale, zero, to + d);
        if (nibbles) store_pairs<4>(codes, 15, scale, zero, to + bytes + d);
      }
    }
  }
}

// A head's blocks together.
inline void join_blocks(const Attend& a, int64_t b, int64_t head) {
  auto out = reinterpret_cast<float*>(own_memory(4 * a.stride));
  float top = -INFINITY, total = 0;
  for (int64_t i = 0; i < a.blocks; ++i) top = std::max(top, a.part(b, i, head)[0]);
  std::fill_n(out, a.stride, 0.0f);
  for (int64_t i = 0; i < a.blocks; ++i) {
    const float* part = a.part(b, i, head);
    if (!(part[0] > -INFINITY)) continue;
    const float weight = std::exp2(part[0] - top);
    total += weight * part[1];
    for (int64_t d = 2; d < a.stride; ++d) out[d] += weight * part[d];
  }
  const float share = total > 0 ? 1 / total : 0.0f;
  a.lse[b * a.heads + head] = total > 0 ? top * kLog2 + std::log(total) : -INFINITY;
  for (int64_t d = 0; d < a.dim; ++d) {
    const int64_t l = d % (2 * LANES);
    const float x = out[2 + d - l + l / 2 + l % 2 * LANES] * share;
    const uint32_t bits = reinterpret_cast<const uint32_t&>(x);
    a.out[(b * a.heads + head) * a.dim + d] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

#undef LANES
