// Package localkube starts and stops temporary Kubernetes control planes, for the demo and for tests.
//
// Tests of most packages use a real API server: ForTest starts one control plane for a test, SeveralForTest starts
// several at once, and Shared returns one for all tests of a binary (testing.go). The command `towline demo` calls
// Start.
//
// Start runs the program localkube, which `make build` builds from its own module. The program has etcd, the API
// server, the scheduler, the important controllers and one simulated node in one process. The steps of a start
// (plane.go):
//
//  1. Binary finds the program (binary.go).
//  2. launch starts it in a process group of its own, with a pipe as standard input: the lifeline. The control plane
//     ends when the pipe breaks, even if the process that started it is killed.
//  3. awaitReady waits for the kubeconfig file, which the program writes once it is ready.
//
// Words:
//
//   - plane: a control plane with one node, in a process of its own.
//   - exec image: a container image whose containers run as processes of a program on this machine. Containers of all
//     other images do nothing and are reported as running.
//   - network: a Linux network namespace (network.go). With a network of their own, planes and agents can have separate
//     addresses on one machine, and tests can interrupt connections. NetworkForTest creates one (testnetwork.go).
//
// Stop ends a plane gracefully, Kill ends it like kill -9, and Restart starts it again with the same objects and port.
//
// Start reading at Start and ForTest.
package localkube
