// Package demo shows the main job on one machine: a hub, a member in pull mode, a member in push mode, and one profile
// on both.
package demo
