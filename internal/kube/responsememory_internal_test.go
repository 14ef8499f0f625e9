package kube

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apidiscovery "k8s.io/api/apidiscovery/v2"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/json"
)

// TestMemoryOfTypes decodes the JSON that needs most memory for its length, and compares the memory with the estimate.
// While append copies, both arrays exist: 1 + 1.25. Measured is only the new one, 1.25, so that 9/5 of it is needed.
//
//nolint:paralleltest // it measures the memory of the whole process
func TestMemoryOfTypes(t *testing.T) {
	const n = 100_000
	for _, test := range []struct {
		begin, element, end string
		decoded             DecodedType
		value               any
	}{
		{`{"items":[`, `{"":0}`, `]}`, TypeAny, &map[string]any{}},
		{`{"items":[`, `{"":{"":0}}`, `]}`, TypeAny, &map[string]any{}},
		{`{"a":[`, `{"":0}`, `]}`, TypeUnstructured, &map[string]any{}},
		{`{"a":{"b":[`, `{"":{"":0}}`, `]}}`, TypeUnstructured, &map[string]any{}},
		{`{"a":{"b":[`, `{"":0,"a":0}`, `]}}`, TypeUnstructured, &map[string]any{}},
		{`{"a":{"b":[`, `[[]]`, `]}}`, TypeUnstructured, &map[string]any{}},
		{`{"a":[`, `"a"`, `]}`, TypeUnstructured, &map[string]any{}},
		{`{"a":{"b":[`, `0`, `]}}`, TypeUnstructured, &map[string]any{}},
		{`{"resources":[`, `null`, `]}`, TypeAny, &metav1.APIResourceList{}},
		{`{"groups":[`, `null`, `]}`, TypeAny, &metav1.APIGroupList{}},
		{`{"items":[`, `null`, `]}`, TypeAny, &apidiscovery.APIGroupDiscoveryList{}},
		{`{"items":[{"versions":[{"resources":[`, `null`, `]}]}]}`, TypeAny, &apidiscovery.APIGroupDiscoveryList{}},
		{`{"items":[{"versions":[{"resources":[`, `{"responseKind":{}}`, `]}]}]}`, TypeAny, &apidiscovery.APIGroupDiscoveryList{}},
		{`{"details":{"causes":[`, `null`, `]}}`, TypeAny, &metav1.Status{}},
		{`{"rows":[`, `null`, `]}`, TypeAny, &metav1.Table{}},
		{`{"rows":[`, `{"cells":[[{"":0}]]}`, `]}`, TypeAny, &metav1.Table{}},
		{`{"items":[`, `null`, `]}`, TypeMetadata, &metav1.PartialObjectMetadataList{}},
		{`{"items":[`, `{"metadata":{"labels":{"":""},"annotations":{"":""}}}`, `]}`, TypeMetadata, &metav1.PartialObjectMetadataList{}},
		{`{"items":[{"metadata":{"managedFields":[`, `null`, `]}}]}`, TypeMetadata, &metav1.PartialObjectMetadataList{}},
		{`{"items":[{"metadata":{"managedFields":[`, `{"fieldsV1":{"a":{"b":{}}}}`, `]}}]}`, TypeMetadata, &metav1.PartialObjectMetadataList{}},
		{`{"metadata":{"managedFields":[`, `{"time":"2006-01-02T15:04:05Z"}`, `]}}`, TypeMetadata, &metav1.PartialObjectMetadata{}},
		{`{"items":[`, `null`, `]}`, TypeBuiltin, &corev1.SecretList{}},
		{`{"items":[`, `{"data":{"":""}}`, `]}`, TypeBuiltin, &corev1.SecretList{}},
		{`{"items":[`, `null`, `]}`, TypeBuiltin, &corev1.PodList{}},
		{`{"items":[`, `null`, `]}`, TypeBuiltin, &batchv1.CronJobList{}},
		{`{"items":[`, `null`, `]}`, TypeBuiltin, &appsv1.StatefulSetList{}},
		{`{"items":[`, `null`, `]}`, TypeBuiltin, &corev1.PersistentVolumeList{}},
		{`{"items":[`, `{"spec":{"containers":[{}]}}`, `]}`, TypeBuiltin, &corev1.PodList{}},
		{`{"spec":{"containers":[`, `null`, `]}}`, TypeBuiltin, &corev1.Pod{}},
		{`{"spec":{"containers":[`, `{"resources":{"requests":{"a":"1"}}}`, `]}}`, TypeBuiltin, &corev1.Pod{}},
		{`{"spec":{"containers":[`, `{"securityContext":{"capabilities":{}},"livenessProbe":{"exec":{}},"lifecycle":{}}`, `]}}`, TypeBuiltin, &corev1.Pod{}},
		{`{"spec":{"volumes":[`, `null`, `]}}`, TypeBuiltin, &corev1.Pod{}},
		{`{"spec":{"volumeClaimTemplates":[`, `null`, `]}}`, TypeBuiltin, &appsv1.StatefulSet{}},
	} {
		raw := []byte(test.begin + strings.TrimSuffix(strings.Repeat(test.element+",", n), ",") + test.end)
		estimate, before := MemoryOf(raw, test.decoded), heap()
		if err := json.UnmarshalCaseSensitivePreserveInts(raw, test.value); err != nil {
			t.Errorf("%s%s: %v", test.begin, test.element, err)
		}
		used := (heap() - before) * 9 / 5
		if test.decoded == TypeUnstructured {
			used = used * 2 / 3 // nearly all of it are maps, which do not grow
		}
		t.Logf("%T %s%s: needs %d bytes per element, estimate %d", test.value, test.begin, test.element, used/n, estimate/n)
		if used > estimate {
			t.Errorf("%T %s%s: needs %d bytes per element, the estimate is %d", test.value, test.begin, test.element, used/n, estimate/n)
		}
		runtime.KeepAlive(test.value)
	}
}

// TestLargestBuiltinTypes: the costs of TypeBuiltin are enough for the largest types of client-go.
func TestLargestBuiltinTypes(t *testing.T) {
	t.Parallel()
	seen := map[reflect.Type]bool{}
	var largest func(parent reflect.Type, isItem bool)
	largest = func(parent reflect.Type, isItem bool) {
		if seen[parent] {
			return
		}
		seen[parent] = true
		for i := range parent.NumField() {
			fieldType := parent.Field(i).Type
			for fieldType.Kind() == reflect.Pointer || fieldType.Kind() == reflect.Map {
				fieldType = fieldType.Elem()
			}
			isSlice := fieldType.Kind() == reflect.Slice
			for fieldType.Kind() == reflect.Slice || fieldType.Kind() == reflect.Pointer {
				fieldType = fieldType.Elem()
			}
			if fieldType.Kind() != reflect.Struct {
				continue
			}
			// While a slice grows, 2.25 of its elements exist.
			limit := TypeBuiltin.costs().element
			if isItem && parent.Field(i).Name == "Items" {
				limit = TypeBuiltin.costs().item
			}
			if size := int64(fieldType.Size()) * 9 / 4; isSlice && size > limit {
				t.Errorf("%s.%s: a slice needs %d bytes per element, the estimate is %d", parent, parent.Field(i).Name, size, limit)
			}
			largest(fieldType, false)
		}
	}
	for gvk, goType := range scheme.Scheme.AllKnownTypes() {
		if builtinKinds()[gvk.Kind] {
			largest(goType, true)
		}
	}
}

// heap returns the bytes of the objects in use.
func heap() int64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// wantReserved reads n bytes of nothing but text from a body for namespace, and compares the error.
func wantReserved(t *testing.T, memory *ResponseMemory, namespace string, n int64, want string) io.Closer {
	t.Helper()
	body := memory.Limit(io.NopCloser(strings.NewReader(strings.Repeat("x", int(n)))), namespace, ContentText)
	_, err := io.Copy(io.Discard, body)
	if got := fmt.Sprint(err); !strings.Contains(got, want) {
		t.Errorf("%d bytes in namespace %s: got %q, want %q", n, namespace, got, want)
	}
	return body
}

func TestResponseMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const tooLarge, noMemory = "the cluster returned data that needs too much memory: more than 6 MiB", "the hub has not enough memory for the responses of clusters in namespace"
		memory := NewResponseMemory(12 << 20)
		// A byte of text costs three, and uncountedPerResponse need no reservation.
		ofText := func(mebibytes float64) int64 { return int64((mebibytes*(1<<20) + uncountedPerResponse) / byteCost) }
		wantReserved(t, memory, "a", ofText(6.1), tooLarge).Close()
		<-time.After(time.Second)
		first := wantReserved(t, memory, "a", ofText(5.9), "<nil>")
		wantReserved(t, memory, "a", ofText(1), noMemory).Close()
		wantReserved(t, memory, "a", ofText(0), "<nil>").Close()
		wantReserved(t, memory, "b", ofText(4), noMemory).Close()
		<-time.After(time.Second)
		second := wantReserved(t, memory, "b", ofText(2.9), "<nil>")
		third := wantReserved(t, memory, "c", ofText(1.4), "<nil>")
		// The memory is free only when the response must have been decoded.
		first.Close()
		closedAt := time.Now()
		fourth := wantReserved(t, memory, "a", ofText(3), "<nil>")
		if waited := time.Since(closedAt); waited < 5<<20*decodeTime {
			t.Errorf("a response has the memory of another one after %s", waited)
		}
		for _, body := range []io.Closer{second, second, third, fourth} {
			body.Close()
		}
		<-time.After(time.Second)
		if memory.reserved != 0 || len(memory.byNamespace) != 0 {
			t.Errorf("%d bytes are still reserved, by %v", memory.reserved, memory.byNamespace)
		}
	})
}

// TestMemoryOfWatches: only the memory of the current event counts. After a long event the watch ends,
// so that its decoder does not keep the buffer.
func TestMemoryOfWatches(t *testing.T) {
	t.Parallel()
	event := func(n int) string { return `{"type":"ADDED","object":{"a":"` + strings.Repeat("}", n) + "\"}}\n" }
	for name, test := range map[string]struct {
		body    string
		repeats int
		want    error
		isEnded bool
	}{
		"many events":           {event(1000), 20_000, nil, false},
		"a long event":          {event(maxWatchBuffer), 1, nil, true},
		"a very long event":     {event(maxEvent), 1, errAny, false},
		"an event without end":  {`{"type":"`, 1 << 20, errAny, false},
		"many values":           {`{"object":{"items":[` + strings.Repeat("{},", 4_000) + "{}]}}", 1, nil, false},
		"many values of a type": {`{"object":{"items":[` + strings.Repeat("{},", 4_000) + `{}],"kind":"PodList"}}`, 1, errAny, false},
		"the same in disguise":  {`{"object":{"items":[` + strings.Repeat("{},", 4_000) + `{}],"\u006bind":"PodList"}}`, 1, errAny, false},
		"too many values":       {`{"object":{"items":[` + strings.Repeat("{},", 100_000) + "{}]}}", 1, errAny, false},
		"a number without end":  {"1", 4 << 20, errAny, false},
		"an end without begin":  {"]", 4 << 20, errAny, false},
		"a string without end":  {`"` + strings.Repeat("}", 8<<20), 1, errAny, false},
		"Protobuf":              {"\x00\x00\x00\x09k8s\x00", 1, errNotJSON, false},
		"YAML":                  {"- a\n", 1, errNotJSON, false},
	} {
		memory := NewResponseMemory(16 << 20)
		source := strings.NewReader(strings.Repeat(test.body, test.repeats) + event(1))
		body := memory.LimitEvents(io.NopCloser(source), "a", ContentObjects, false)
		_, err := io.Copy(io.Discard, body)
		if test.want == nil != (err == nil) || errors.Is(test.want, errNotJSON) && !errors.Is(err, errNotJSON) {
			t.Errorf("%s: error %v, want %v", name, err, test.want)
		}
		if isEnded := body.(*reservingBody).isEnded; isEnded != test.isEnded {
			t.Errorf("%s: the watch has ended: %t", name, isEnded)
		}
	}
}

var errAny = errors.New("an error")

// TestReservationExpires: a cluster stops to send in the middle of a response.
func TestReservationExpires(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		memory := NewResponseMemory(12 << 20)
		reader, writer := io.Pipe()
		body := memory.LimitEvents(reader, "a", ContentObjects, false)
		ended := make(chan error)
		go func() {
			_, err := io.Copy(io.Discard, body)
			ended <- errors.Join(err, body.Close())
		}()
		if _, err := io.WriteString(writer, `{"a":[`+strings.Repeat("{},", 5000)); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if err := <-ended; err == nil {
			t.Error("the read did not fail")
		}
		if waited := time.Since(start); waited != maxHold {
			t.Errorf("the read failed after %s", waited)
		}
		<-time.After(time.Second)
		if memory.reserved != 0 {
			t.Errorf("%d bytes are still reserved", memory.reserved)
		}
	})
}
