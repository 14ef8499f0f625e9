package hub_test

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	ctrl "sigs.k8s.io/controller-runtime"
)

// TestMain shows the hub's log where HUB_LOG is set.
func TestMain(m *testing.M) {
	log := logr.Discard()
	if os.Getenv("HUB_LOG") != "" {
		log = funcr.New(func(prefix, args string) { _, _ = os.Stderr.WriteString(prefix + " " + args + "\n") }, funcr.Options{LogTimestamp: true})
	}
	ctrl.SetLogger(log)
	m.Run()
}
