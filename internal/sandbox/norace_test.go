//go:build !race

package sandbox_test

// isRace is true if the tests run with the race detector.
const isRace = false
