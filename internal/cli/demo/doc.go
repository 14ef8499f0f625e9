// Package demo shows registration and deployment on one machine: a hub, a member in pull mode, a member in push mode,
// and two profiles for both.
package demo
