package kube

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"
)

// TestMemoryOfValues decodes and encodes objects, and compares the used memory with Documents.Memory.
//
//nolint:paralleltest // it measures the memory of the whole process
func TestMemoryOfValues(t *testing.T) {
	const n = 20_000
	fields := func(count int) string {
		var all []string
		for i := range count {
			all = append(all, fmt.Sprintf(`"field%d":1000`, i))
		}
		return "{" + strings.Join(all, ",") + "}"
	}
	for _, element := range []string{
		`{}`, `[]`, `null`, `1000`, `"a"`, `"` + strings.Repeat("x", 100) + `"`, `"` + strings.Repeat("<", 100) + `"`, `"` + strings.Repeat(`\u0001`, 100) + `"`,
		`{"":0}`, `{"":{}}`, `[[]]`, fields(7), fields(8), fields(9), fields(14), fields(15), fields(100),
		`{"name":"web","image":"registry.example.com/web:1.0.0","ports":[{"containerPort":8080,"protocol":"TCP"}]}`,
	} {
		raw := []byte(`{"x":[` + strings.TrimSuffix(strings.Repeat(element+",", n), ",") + `]}`)
		runtime.GC() // together with that in heap, it empties the pool of buffers of encoding/json
		before := heap()
		fields := map[string]any{}
		if err := utiljson.Unmarshal(raw, &fields); err != nil {
			t.Fatal(err)
		}
		documents := NewDocuments([]*unstructured.Unstructured{{Object: fields}})
		if _, err := documents.Encode(documents.objects); err != nil {
			t.Fatal(err)
		}
		runtime.GC()
		used, estimate := heap()-before, documents.Memory()
		if t.Logf("%.60s: %d bytes per element, estimate %d", element, used/n, estimate/n); used > estimate || estimate > 4*used {
			t.Errorf("%.60s needs %d bytes per element, the estimate is %d", element, used/n, estimate/n)
		}
		runtime.KeepAlive(documents)
		runtime.KeepAlive(raw)
	}
}

// documentsOf returns Documents whose memory is a little more than n MiB.
func documentsOf(mebibytes int) *Documents {
	text := strings.Repeat("x", mebibytes<<20/2)
	return NewDocuments([]*unstructured.Unstructured{{Object: map[string]any{"x": text}}})
}

func TestContentMemoryIsShared(t *testing.T) {
	t.Parallel()
	memory := NewContentMemory(100 << 20)
	documents := documentsOf(40)
	var all []*ContentReservation
	for range 10 {
		reserved := memory.Reserve("one")
		all = append(all, reserved)
		if err := errors.Join(reserved.AddDocuments(documents), reserved.AddDocuments(documents)); err != nil {
			t.Fatal(err)
		}
	}
	reserved := memory.Reserve("one")
	if err := reserved.AddDocuments(documentsOf(20)); !errors.Is(err, ErrMemoryInUse) {
		t.Errorf("more than a half for one namespace: got %v", err)
	}
	if err := reserved.Add(60 << 20); !errors.Is(err, ErrContentTooLarge) {
		t.Errorf("more than a half for one content: got %v", err)
	}
	if err := all[0].Add(11 << 20); !errors.Is(err, ErrContentTooLarge) {
		t.Errorf("more than a half together with Documents: got %v", err)
	}
	if err := all[0].Add(9 << 20); err != nil {
		t.Errorf("a half together with Documents: got %v", err)
	}
	all[0].Subtract(9 << 20)
	other := memory.Reserve("two")
	if err := other.AddDocuments(documentsOf(20)); err != nil {
		t.Errorf("another namespace: %v", err)
	}
	for _, holder := range all[1:] {
		holder.Release()
	}
	if err := reserved.Add(20 << 20); !errors.Is(err, ErrMemoryInUse) {
		t.Errorf("while one holder is left: got %v", err)
	}
	all[0].Release()
	if err := reserved.Add(20 << 20); err != nil {
		t.Errorf("after the release: %v", err)
	}
	reserved.Release()
	other.Release()
	checkReleased(t, memory)
}

// TestSharedMemoryMovesToAnotherNamespace has Documents in two namespaces. They count for the namespace that still has
// them.
func TestSharedMemoryMovesToAnotherNamespace(t *testing.T) {
	t.Parallel()
	memory := NewContentMemory(100 << 20)
	documents := documentsOf(30)
	first, second := memory.Reserve("one"), memory.Reserve("two")
	if err := errors.Join(first.AddDocuments(documents), second.AddDocuments(documents)); err != nil {
		t.Fatal(err)
	}
	one, two := memory.Reserve("one"), memory.Reserve("two")
	err := one.Add(30 << 20)
	if !errors.Is(err, ErrMemoryInUse) || one.IsErrorOfOther(err) || !two.IsErrorOfOther(err) {
		t.Errorf("in the first namespace: got %v", err)
	}
	if err := two.Add(30 << 20); err != nil {
		t.Errorf("in the second namespace: %v", err)
	}
	two.Subtract(30 << 20)
	first.Release()
	if err := one.Add(30 << 20); err != nil {
		t.Errorf("in the first namespace after the release: %v", err)
	}
	one.Release()
	if err := two.Add(30 << 20); !errors.Is(err, ErrMemoryInUse) {
		t.Errorf("in the second namespace after the release: got %v", err)
	}
	two.Release()
	second.Release()
	checkReleased(t, memory)
}

// TestContentMemoryIsReleasedAfterSnapshot repeats what has added to a ContentReservation.
func TestContentMemoryIsReleasedAfterSnapshot(t *testing.T) {
	t.Parallel()
	memory := NewContentMemory(100 << 20)
	kept, small, other := documentsOf(5), documentsOf(0), memory.Reserve("two")
	reserved := memory.Reserve("one")
	if err := errors.Join(reserved.AddDocuments(kept), other.AddDocuments(kept), reserved.Add(5<<20)); err != nil {
		t.Fatal(err)
	}
	snapshot, before := reserved.snapshot(), memory.memory.reserved
	for range 10 {
		if err := errors.Join(reserved.AddDocuments(documentsOf(30)), reserved.AddDocuments(small), reserved.AddDocuments(kept), reserved.Add(5<<20)); err != nil {
			t.Fatal(err)
		}
		reserved.releaseAfter(snapshot)
		if memory.memory.reserved != before || len(memory.documents) != 1 || reserved.sharedBytes != kept.Memory() || reserved.smallBytes != 0 {
			t.Fatalf("%d bytes, %d Documents, %d and %d bytes of this reservation stay", memory.memory.reserved-before, len(memory.documents),
				reserved.sharedBytes, reserved.smallBytes)
		}
	}
	reserved.Release()
	other.Release()
	checkReleased(t, memory)
}

// TestContentWaitsForMemory has content for which others have the memory at first.
func TestContentWaitsForMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		memory := NewContentMemory(64 << 20)
		own, other := memory.Reserve("one"), memory.Reserve("two")
		if err := other.Add(30 << 20); err != nil {
			t.Fatal(err)
		}
		errOfOther := NewContentMemory(64 << 20).Reserve("two").Add(100 << 20)
		calls := 0
		err := own.Retry(t.Context(), func() error {
			switch calls++; calls {
			case 1: // it waits for a reconcile that fails
				return errOfOther
			case 2:
				time.AfterFunc(retryPause, func() {
					if own.otherContent.currentSize() > 0 {
						t.Error("the memory of the failed call is reserved in the pause")
					}
				})
				return errors.Join(own.Add(15<<20), own.Add(10<<20))
			}
			other.Release()
			return own.Add(25 << 20)
		})
		if err != nil || calls != 3 {
			t.Errorf("got %v after %d calls, want none after 3", err, calls)
		}
		for pause, want := range map[time.Duration]int{0: retryAttempts, retryTime: 1} {
			calls = 0
			err = own.Retry(t.Context(), func() error {
				<-time.After(pause)
				calls++
				return errOfOther
			})
			if err == nil || calls != want {
				t.Errorf("calls of %s: got %v after %d calls, want an error after %d", pause, err, calls, want)
			}
		}
		calls = 0
		if err := own.Retry(t.Context(), func() error { calls++; return own.Add(100 << 20) }); !errors.Is(err, ErrContentTooLarge) || calls != 1 {
			t.Errorf("too large: got %v after %d calls, want 1", err, calls)
		}
	})
}

// TestTakeFailure has a caller that continues without memory.
func TestTakeFailure(t *testing.T) {
	t.Parallel()
	memory := NewContentMemory(64 << 20)
	own, other := memory.Reserve("one"), memory.Reserve("one")
	if err := errors.Join(own.Add(20<<20), other.TakeFailure()); err != nil {
		t.Fatal(err)
	}
	_ = other.Add(20 << 20) // the error is lost
	if err := other.TakeFailure(); !errors.Is(err, ErrMemoryInUse) {
		t.Errorf("got %v, want ErrMemoryInUse", err)
	}
	if err := other.TakeFailure(); err != nil {
		t.Errorf("got %v again", err)
	}
}

func TestContentMemoryAfterRelease(t *testing.T) {
	t.Parallel()
	memory := NewContentMemory(100 << 20)
	reserved := memory.Reserve("one")
	if err := reserved.Add(30 << 20); err != nil {
		t.Fatal(err)
	}
	reserved.Release()
	// A rendering continues.
	if err := reserved.Add(1 << 20); !errors.Is(err, ErrMemoryInUse) {
		t.Errorf("got %v", err)
	}
	if err := errors.Join(reserved.MoveToDocuments(documentsOf(4), 1<<20), reserved.AddDocuments(documentsOf(4))); err != nil {
		t.Error(err)
	}
	reserved.Subtract(1 << 20)
	checkReleased(t, memory)
}

// checkReleased checks that nothing is reserved.
func checkReleased(t *testing.T, memory *ContentMemory) {
	t.Helper()
	if memory.memory.reserved != 0 || len(memory.memory.byNamespace) > 0 || len(memory.documents) > 0 {
		t.Errorf("%d bytes and %d Documents stay", memory.memory.reserved, len(memory.documents))
	}
}

// TestContentMemoryIsReleased reserves and releases memory at random. Nothing stays reserved.
func TestContentMemoryIsReleased(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the test is repeatable
	memory := NewContentMemory(64 << 20)
	documents := make([]*Documents, 12)
	for i := range documents {
		documents[i] = documentsOf(i)
	}
	for range 500 {
		var all []*ContentReservation
		for range 4 {
			all = append(all, memory.Reserve(fmt.Sprint(random.IntN(2))))
		}
		for range 10 {
			reserved, d, n := all[random.IntN(len(all))], documents[random.IntN(len(documents))], random.Int64N(8<<20)
			if err := reserved.Add(n); err != nil {
				continue
			}
			switch random.IntN(3) {
			case 0:
				_ = reserved.MoveToDocuments(d, n) // there may be no memory, here and below
			case 1:
				reserved.Subtract(n)
				_ = reserved.AddDocuments(d)
			}
		}
		for _, reserved := range all {
			reserved.Release()
		}
		checkReleased(t, memory)
	}
}
