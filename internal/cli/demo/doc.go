// Package demo shows registration and deployment on one machine: a hub, a member in pull mode, a member in push mode,
// and two profiles for both. Start reading at Run and runSteps in demo.go.
package demo
