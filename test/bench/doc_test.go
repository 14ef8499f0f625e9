// Package bench measures the latencies and the resources of Towline on real control planes. It prints them, and
// compares them with no limit.
package bench
