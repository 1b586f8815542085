// How a block is built, all of it known to the compiler: HEAD_DIM, ROWS, STAGES come with the
// build.
//
// Warps that share keys are a team; a team owns its keys, its copies and their pipeline. A warp
// holds ROWS_PER_WARP query rows, as many as fit in its registers, so a team has ROWS /
// ROWS_PER_WARP warps.
#pragma once

#include "ptx.cuh"

constexpr int D = HEAD_DIM;
constexpr int kRows = ROWS;
constexpr int kStages = STAGES;
constexpr int kWarps = kRows == 64 && D > 128 ? 8 : 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRowsPerWarp = kRows == 16 || D > 128 ? 16 : 32;
constexpr int kTeamWarps = kRows / kRowsPerWarp;
constexpr int kTeamThreads = 32 * kTeamWarps;
constexpr int kTeams = kWarps / kTeamWarps;
constexpr int kKeys = D == 64 && kRows == 16 ? 32 : 16;  // per step and team
constexpr int kUnit = kTeams * kKeys;                    // a split is a multiple of it

constexpr int kTiles = kRowsPerWarp / 16;  // of 16 rows, in a warp
constexpr int kColumns = D / 8;            // tiles of 8 output columns; 16-byte pieces of a row
constexpr int kPitch = 2 * D + 16;         // bytes: an odd number of pieces, so no bank conflicts
constexpr int kFlags = 2 * D;  // where bytes without elements begin in a row: two for each lane
constexpr int kKeyBytes = kKeys * kPitch;
constexpr int kStageBytes = 2 * kKeyBytes;  // K, then V
constexpr bool kQueriesInRegisters = kTiles == 1 && D <= 128;

// Lanes that copy one row together, and how many rows and pieces each lane copies per step.
constexpr int kFewLanes = kTeamThreads / kKeys > 2 ? kTeamThreads / kKeys : 2;
constexpr int kLanesPerRow = kFewLanes < 4 && kColumns % 4 == 0 ? 4 : kFewLanes;
constexpr int kRowsAtOnce = 8 / kLanesPerRow;  // that eight lanes write
constexpr int kRowsPerPass = kTeamThreads / kLanesPerRow;
constexpr int kPasses = kKeys / kRowsPerPass;
constexpr int kPieces = (kColumns + kLanesPerRow - 1) / kLanesPerRow;

static_assert(kLanesPerRow <= 8, "a row has room for their flags");
static_assert(D % 16 == 0 && kKeys % kRowsPerPass == 0, "a tile of keys is copied whole");

// Shared memory: query rows and the teams' stages, and at the end the teams' states over all of it.
constexpr int kQueryBytes = kQueriesInRegisters ? 0 : kRows * kPitch;
constexpr int kPipelineBytes = kTeams * kStages * kStageBytes;
constexpr int kMergeBytes = kTeams * kRows * (D + 2) * 4;
