package kube_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/kube"
)

func TestRetryOnConflictReturnsTheLastError(t *testing.T) {
	t.Parallel()
	conflict := apierrors.NewConflict(corev1.Resource("secrets"), "s", errors.New("it was changed"))
	wrapped := fmt.Errorf("write secret: %w", &url.Error{Op: "Put", URL: "https://hub", Err: context.Canceled})
	refused := errors.New("refused")
	for name, test := range map[string]struct {
		failures []error // of one try after the other; the next one succeeds
		want     error
		tries    int
	}{
		"success":                     {nil, nil, 1},
		"cancelled":                   {[]error{context.Canceled}, context.Canceled, 1},
		"timed out":                   {[]error{context.DeadlineExceeded}, context.DeadlineExceeded, 1},
		"cut off in a request":        {[]error{wrapped}, wrapped, 1},
		"an interrupted wait":         {[]error{wait.ErrorInterrupted(refused)}, refused, 1},
		"refused":                     {[]error{refused}, refused, 1},
		"a conflict":                  {[]error{conflict}, nil, 2},
		"a wrapped conflict":          {[]error{fmt.Errorf("claim: %w", conflict)}, nil, 2},
		"cut off after a conflict":    {[]error{conflict, wrapped}, wrapped, 2},
		"timed out after a conflict":  {[]error{conflict, context.DeadlineExceeded}, context.DeadlineExceeded, 2},
		"as many conflicts as it may": {[]error{conflict, conflict, conflict, conflict}, nil, 5},
		"nothing but conflicts":       {[]error{conflict, conflict, conflict, conflict, conflict, refused}, conflict, 5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				tries := 0
				err := kube.RetryOnConflict(t.Context(), func() error {
					tries++
					if tries <= len(test.failures) {
						return test.failures[tries-1]
					}
					return nil
				})
				if !errors.Is(err, test.want) {
					t.Errorf("got %v, want %v", err, test.want)
				}
				if tries != test.tries {
					t.Errorf("got %d tries, want %d", tries, test.tries)
				}
			})
		})
	}
}

func TestRetryOnConflictReturnsATimeout(t *testing.T) {
	t.Parallel()
	answer := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-answer }))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(answer) })
	slow := server.Client()
	slow.Timeout = 10 * time.Millisecond
	err := kube.RetryOnConflict(t.Context(), func() error {
		response, err := slow.Get(server.URL)
		if err == nil {
			response.Body.Close()
		}
		return err
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
	}
}

func TestRetryOnEndsWithItsContext(t *testing.T) {
	t.Parallel()
	always := func(error) bool { return true }
	for name, test := range map[string]struct {
		end   time.Duration // after the first try began; negative: before
		tries int
	}{
		"before the first try":  {-1, 0},
		"during a try":          {500 * time.Millisecond, 1},
		"between two tries":     {1500 * time.Millisecond, 1},
		"in the middle of many": {5500 * time.Millisecond, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if test.end < 0 {
					cancel()
				} else {
					time.AfterFunc(test.end, cancel)
				}
				began, tries := time.Now(), 0
				err := kube.RetryOnWithBackoff(ctx, wait.Backoff{Steps: 20, Duration: time.Second}, always, func() error {
					tries++
					<-time.After(time.Second)
					return errors.New("refused")
				})
				if !errors.Is(err, context.Canceled) {
					t.Errorf("got %v, want %v", err, context.Canceled)
				}
				if tries != test.tries {
					t.Errorf("got %d tries, want %d", tries, test.tries)
				}
				if took := time.Since(began); took > max(test.end, 0)+time.Second {
					t.Errorf("it went on for %s after the context had ended at %s", took, test.end)
				}
			})
		})
	}
}

func TestRetryOnRetriesTheGivenErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		err := kube.RetryOn(t.Context(), func(error) bool { return true }, func() error {
			tries++
			return context.DeadlineExceeded
		})
		if !errors.Is(err, context.DeadlineExceeded) || tries != 5 {
			t.Errorf("got %v after %d tries, want %v after 5", err, tries, context.DeadlineExceeded)
		}
	})
}
