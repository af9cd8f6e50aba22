// The AMX instructions that int8_linear_amx.h has, for a test of it on processors without them (-DQP_EMULATE_AMX). By
// the pseudocode of Intel's Architectures Software Developer's Manual, volume 2.
#pragma once

#include <cstdint>
#include <cstring>

namespace qwen_patch::cpu::amx {

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64];
};
inline thread_local Tile tiles[8];

inline void load_config(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, 64);
  if (bytes[0] != 1 || bytes[1] != 0) __builtin_trap();
  for (int i = 0; i < 8; ++i) {
    uint16_t width;
    std::memcpy(&width, bytes + 16 + 2 * i, 2);
    tiles[i] = {};
    tiles[i].bytes = width, tiles[i].rows = bytes[48 + i];
    if (width > 64 || tiles[i].rows > 16) __builtin_trap();
  }
}
inline Tile& configured(int i) {
  if (tiles[i].rows == 0 || tiles[i].bytes == 0) __builtin_trap();
  return tiles[i];
}
inline void zero(int i) { std::memset(configured(i).data, 0, sizeof(Tile::data)); }
inline void load(int i, const void* base, int64_t stride) {
  Tile& t = configured(i);
  for (int r = 0; r < t.rows; ++r) std::memcpy(t.data[r], static_cast<const char*>(base) + r * stride, t.bytes);
}
inline void store(int i, void* base, int64_t stride) {
  Tile& t = configured(i);
  for (int r = 0; r < t.rows; ++r) std::memcpy(static_cast<char*>(base) + r * stride, t.data[r], t.bytes);
}
// to [m][n] += signed a [m][4 k + i] * unsigned b [k][4 n + i], int32.
inline void dot_signed_unsigned(int to, int a, int b) {
  Tile &c = configured(to), &x = configured(a), &w = configured(b);
  if (x.rows != c.rows || w.rows != x.bytes / 4 || w.bytes != c.bytes) __builtin_trap();
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.bytes / 4; ++n) {
      int32_t sum;
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int k = 0; k < w.rows; ++k)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<int8_t>(x.data[m][4 * k + i]) * static_cast<int32_t>(w.data[k][4 * n + i]);
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}
inline void release() {
  for (Tile& t : tiles) t.rows = t.bytes = 0;
}

}  // namespace qwen_patch::cpu::amx

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig qwen_patch::cpu::amx::load_config
#define _tile_release qwen_patch::cpu::amx::release
#define _tile_zero qwen_patch::cpu::amx::zero
#define _tile_loadd qwen_patch::cpu::amx::load
#define _tile_stored qwen_patch::cpu::amx::store
#define _tile_dpbsud qwen_patch::cpu::amx::dot_signed_unsigned
