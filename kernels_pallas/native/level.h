// One level of instructions: vectors of LANES 32-bit numbers. Included by `kernels.cc`, in a
// namespace of its own and under the level's target.

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef int16_t S __attribute__((vector_size(4 * LANES)));

constexpr int64_t kTile = LANES == 16 ? 4 : 2;  // key vectors that a few rows go over at once

// acc + the products of both halves of each lane's pair of int16.
inline I dot(I acc, I a, I b) {
#if defined(AVX512)
  return (I)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(AVX2)
  return acc + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
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
    if (!(i & S)) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, LANES>());
  if constexpr (2 * S < LANES) transpose<2 * S>(rows);
}

// The greater of each lane; the second where they do not compare.
inline F greater(F a, F b) {
#if defined(AVX512)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(AVX2)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// 2 to the power of x, off by 1e-7 of it at most; 0 below the normal numbers.
inline F power_of_2(F x) {
  const F above = x + 12582912.0f;  // 1.5 * 2**23: the nearest whole number is its lowest bits
  const F whole = above - 12582912.0f, r = x - whole;
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
template <int S, int... L, typename Join>
inline F joined(F x, const Join& join, std::integer_sequence<int, L...> lanes) {
  x = join(x, SHUFFLE(x, x, (L ^ S)...));
  if constexpr (S > 1) return joined<S / 2>(x, join, lanes);
  return x;
}

inline float greatest(F x) {
  return joined<LANES / 2>(x, greater, std::make_integer_sequence<int, LANES>())[0];
}

inline float sum_of(F x) {
  const auto add = [](F a, F b) { return a + b; };
  return joined<LANES / 2>(x, add, std::make_integer_sequence<int, LANES>())[0];
}

// A head's real queries as int16, in the order in which `unpack` leaves the keys' dims.
inline void whole_numbers(const Score& s, int64_t head) {
  const int64_t half = s.dim / 2, heads = s.kv_heads * s.group;
  int64_t row = head * s.most_rows;
  auto values = reinterpret_cast<float*>(own_memory(4 * s.dim));
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t i = 0; i < std::min<int64_t>(s.lengths[b], s.queries); ++i)
      for (int64_t g = 0; g < s.group; ++g, ++row) {
        const int64_t at = ((b * s.queries + i) * heads + head * s.group + g) * s.dim;
        float most = 0;
        for (int64_t d = 0; d < s.dim; ++d) {
          values[d] = s.q_bfloat16 ? bfloat16(static_cast<const uint16_t*>(s.q)[at + d])
                                   : static_cast<const float*>(s.q)[at + d];
          most = std::max(most, std::fabs(values[d]));
        }
        const float inverse = most > 0 ? 32767.0f / most : 0.0f;
        int32_t sum = 0;
        auto rounded = [&](int64_t d) {
          const float above = values[d] * inverse + 12582912.0f;
          int32_t number;
          std::memcpy(&number, &above, 4);
          number -= 0x4b400000;
          sum += number;
          return number;
        };
        int32_t* numbers = s.numbers + row * half;
        auto pair = [&](int64_t d) {
          const int32_t low = rounded(d), high = rounded(d + 2);
          *numbers++ = (low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16);
        };
        for (int64_t w = 0; w < s.key_bytes() / 4; ++w)
          for (int64_t from = 0; from < s.dim; from += s.int4 ? half : s.dim)
            pair(from + 4 * w), pair(from + 4 * w + 1);
        s.base[row] = s.int4 ? -8 * sum : 0;
        s.unit[row] = (most > 0 ? most / 32767.0f : 1.0f) * s.factor;
      }
  for (; row < (head + 1) * s.most_rows; ++row) {  // of no query
    std::fill_n(s.numbers + row * half, half, 0);
    s.base[row] = 0, s.unit[row] = 1;
  }
}

// The keys of a block of LANES chunks as int16: vector j of a block has token j of every chunk.
// keys [tiles, D / 2, kTile], scale and bias [tiles * kTile].
inline void unpack(const Score& s, int64_t head, int64_t block, I* keys, F* scale, F* bias) {
  const int64_t bytes = s.key_bytes(), half = s.dim / 2;
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
    I* to = keys + j / kTile * kTile * half + j % kTile;
    for (int64_t w = 0; w < bytes / 4; w += LANES) {
      const int64_t words = std::min<int64_t>(bytes / 4 - w, LANES);
      I x[LANES];
      for (int l = 0; l < LANES; ++l) x[l] = load(from[l] + 4 * w, words);
      transpose(x);
      for (int64_t i = 0; i < words; ++i) {
        if (s.int4) {
          for (int shift : {0, 8, 4, 12}) *to = (x[i] >> shift) & 0x000f000f, to += kTile;
        } else {  // a byte's sign goes up through its int16
          *to = (I)(((S)x[i] << 8) >> 8), to += kTile;
          *to = (I)((S)x[i] >> 8), to += kTile;
        }
      }
    }
  }
}

// Of a block of LANES chunks and every row of a KV head: each chunk's sum of exponentials, less the
// greatest logit of the block, and that logit.
inline void score_block(const Score& s, int64_t head, int64_t block) {
  const int64_t half = s.dim / 2, tiles = (s.chunk + kTile - 1) / kTile, tokens = tiles * kTile;
  auto keys = reinterpret_cast<I*>(own_memory(sizeof(I) * tokens * (half + 2 + kTogether)));
  auto scale = reinterpret_cast<F*>(keys + tokens * half), bias = scale + tokens;
  F* logits = bias + tokens;
  unpack(s, head, block, keys, scale, bias);
  for (int64_t row = head * s.most_rows; row < (head + 1) * s.most_rows; row += kTogether) {
    F top[kTogether];
    for (int r = 0; r < kTogether; ++r) top[r] = F{} - INFINITY;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      I sums[kTogether][kTile];
      for (int r = 0; r < kTogether; ++r)
        for (int j = 0; j < kTile; ++j) sums[r][j] = I{} + s.base[row + r];
      const I* key = keys + tile * kTile * half;
      const int32_t* numbers = s.numbers + row * half;
      for (int64_t i = 0; i < half; ++i, key += kTile)
        for (int r = 0; r < kTogether; ++r)
          for (int j = 0; j < kTile; ++j)
            sums[r][j] = dot(sums[r][j], key[j], I{} + numbers[r * half + i]);
      for (int r = 0; r < kTogether; ++r)
        for (int64_t j = tile * kTile, t = 0; t < kTile; ++j, ++t) {
          const F x = __builtin_convertvector(sums[r][t], F) * scale[j] + bias[j];
          logits[r * tokens + j] = x;
          top[r] = greater(x, top[r]);
        }
    }
    for (int r = 0; r < kTogether; ++r) {
      const float most = greatest(top[r]), unit = s.unit[row + r];
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
  for (int64_t before = 0; before < b; ++before)
    row += s.group * std::clamp<int64_t>(s.lengths[before], 0, s.queries);
  const int64_t length = s.lengths[b];
  for (int64_t i = 0; i < std::min(length, s.queries); ++i)
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
      const float share = 1.0f / (sum_of(total) * (s.peaks ? static_cast<float>(length - i) : 1));
      for (int64_t at = 0; at < s.blocks; ++at) {
        const F mass = sums[at] * (weight[at] * share);
        masses[at] += mass;
        squares[at] += mass * mass;
      }
    }
  const int64_t of_all = s.batch * s.kv_heads * s.chunks;
  float* out = s.out + (b * s.kv_heads + head) * s.chunks;
  std::memcpy(out, masses, 4 * s.chunks);
  if (s.peaks) std::memcpy(out + of_all, squares, 4 * s.chunks);
}

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

// Two vectors of a row of weights [O, I]: bfloat16 at even and at odd places, or int8 as they come.
template <bool kInt8>
inline void weights_at(const char* from, F& a, F& b) {
  if constexpr (kInt8) {
    a = widened(from), b = widened(from + LANES);
  } else {
    I pairs;
    std::memcpy(&pairs, from, sizeof(pairs));
    a = (F)(pairs << 16), b = (F)(pairs & ~0xffff);
  }
}

// A row of x as float32, in the order of `weights_at`.
inline void spread(const Product& p, int64_t row) {
  for (int64_t i = 0; i < p.inputs; ++i) {
    const int64_t at = i % (2 * LANES), l = p.int8 ? at : at / 2 + at % 2 * LANES;
    p.spread[row * p.inputs + i - at + l] = bfloat16(p.x[row * p.inputs + i]);
  }
}

template <int R, bool kInt8>
inline void few_rows(const Product& p, int64_t first, int64_t last) {
  const int64_t steps = p.inputs / (2 * LANES), bytes = kInt8 ? 2 * LANES : 4 * LANES;
  for (int64_t o = first; o < last; o += kTogether) {
    const char* from = p.weight + o * steps * bytes;
    F sums[R][kTogether] = {}, a, b;
    for (int64_t i = 0; i < steps; ++i, from += bytes)
      for (int k = 0; k < kTogether; ++k) {
        weights_at<kInt8>(from + k * steps * bytes, a, b);
        for (int r = 0; r < R; ++r) {
          auto x = reinterpret_cast<const F*>(p.spread) + 2 * (r * steps + i);
          sums[r][k] += x[0] * a, sums[r][k] += x[1] * b;
        }
      }
    for (int r = 0; r < R; ++r)
      for (int k = 0; k < kTogether; ++k)
        p.out[r * p.outputs + o + k] = sum_of(sums[r][k]) * (kInt8 ? p.scale[o + k] : 1.0f);
  }
}

template <int R = 1>
inline void product(const Product& p, int64_t first, int64_t last) {
  if constexpr (R < kMostRows)
    if (R < p.rows) return product<R + 1>(p, first, last);
  return p.int8 ? few_rows<R, true>(p, first, last) : few_rows<R, false>(p, first, last);
}
