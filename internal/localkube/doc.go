// Package localkube starts and stops throw-away Kubernetes control planes, for the demo and for tests.
package localkube
