package check_test

import (
	"encoding/json"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/sandbox"
)

// The arguments with which the tests start their binary as a child of the sandbox.
const (
	serve = "serve"
	// serveWrong starts a child whose functions return the index 7.
	serveWrong = "serve-wrong"
)

// checker shares its child processes between all tests.
var checker = check.Checker{Sandbox: sandbox.NewPool([]string{os.Args[0], serve}, clock.RealClock{}), Cluster: client.ObjectKey{Namespace: "eu", Name: "one"}}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serve {
		if err := sandbox.Serve(check.Functions(), os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == serveWrong {
		functions := check.Functions()
		for name := range functions {
			functions[name] = func(json.RawMessage, func(any) (json.RawMessage, error)) (any, error) { return []int{7}, nil }
		}
		if err := sandbox.Serve(functions, os.Stdin, os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	m.Run()
}

// member returns a reader of a real API server, and a namespace of it with two ConfigMaps.
func member(t *testing.T) (client.Reader, string) {
	t.Helper()
	plane := localkube.Shared(t)
	ns := plane.Namespace(t, "check")
	member, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	for name, tier := range map[string]string{"one": "gold", "two": "tin"} {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"tier": tier, "t": "x"}}, Data: map[string]string{"state": tier}}
		if err := member.Create(t.Context(), cm); err != nil {
			t.Fatal(err)
		}
	}
	reader, err := check.NewReader(plane.Config)
	if err != nil {
		t.Fatal(err)
	}
	return reader, ns
}
