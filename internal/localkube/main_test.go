package localkube_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/localkube"
)

// roleVariable makes this test binary run as the program of a pod, or as a parent process that is killed.
const roleVariable = "LOCALKUBE_TEST_ROLE"

// networkVariable is the network of the parent's control plane.
const networkVariable = "LOCALKUBE_TEST_NETWORK"

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(roleVariable) {
	case "pod":
		err = runPod()
	case "parent":
		err = runParent()
	default:
		m.Run()
	}
	if err != nil {
		panic(err)
	}
}

// podReport is the first output of a pod's program.
type podReport struct {
	PID  int
	Args []string
	Env  map[string]string
	User string
}

// runPod prints a podReport and runs until it gets SIGTERM; with the argument "crash" it fails at once.
func runPod() error {
	report := podReport{PID: os.Getpid(), Args: os.Args[1:], Env: map[string]string{}}
	for _, entry := range os.Environ() {
		name, value, _ := strings.Cut(entry, "=")
		report.Env[name] = value
	}
	var err error
	if report.User, err = requestUser(); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		return err
	}
	if len(os.Args) > 1 && os.Args[1] == "crash" {
		return errors.New("asked to crash")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	<-ctx.Done()
	fmt.Println("asked to end")
	return nil
}

// requestUser returns the user of the pod's credentials.
func requestUser() (string, error) {
	dir := os.Getenv("TOWLINE_SERVICEACCOUNT_DIR")
	if dir == "" {
		return "", nil
	}
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:            "https://" + os.Getenv("KUBERNETES_SERVICE_HOST") + ":" + os.Getenv("KUBERNETES_SERVICE_PORT"),
		BearerTokenFile: filepath.Join(dir, "token"),
		TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(dir, "ca.crt")},
	})
	if err != nil {
		return "", err
	}
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(context.Background(),
		&authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return review.Status.UserInfo.Username, nil
}

// parentReport is the output of runParent when its control plane is ready.
type parentReport struct {
	Dir, Kubeconfig string
	Port            int
}

// runParent starts a control plane and waits until it is killed.
func runParent() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p, err := localkube.Start(context.Background(), localkube.Options{
		Exec: map[string]string{podImage: self}, Network: localkube.Network(os.Getenv(networkVariable)),
	})
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(parentReport{Dir: p.Dir, Kubeconfig: p.Kubeconfig, Port: p.Port()}); err != nil {
		return err
	}
	select {}
}

// eventually fails the test unless check returns true within a minute. check also returns the state for the message.
func eventually(t *testing.T, condition string, check func(context.Context) (bool, string)) {
	t.Helper()
	seen := ""
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		ok, now := check(ctx)
		seen = now
		return ok, nil
	})
	if err != nil {
		t.Fatalf("%s: %v; last seen: %s", condition, err, seen)
	}
}

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one that contains %q", err, text)
	}
}
