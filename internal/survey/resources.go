package survey

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// amounts holds a quantity of each resource. The resources that nearly every pod and node has are fields, to save
// memory.
type amounts struct {
	milliCPU, memory, storage int64
	// others is nil for most pods. The map of a stored pod or node is never changed.
	others map[corev1.ResourceName]int64
}

// size returns how much memory a needs besides the struct, in bytes.
func (a amounts) size() int {
	if a.others == nil {
		return 0
	}
	const table, slot = 256, 32 // estimates for a small map, and for each of its entries
	size := table
	for name := range a.others {
		size += slot + len(name)
	}
	return size
}

// amountsOf converts a resource list. It leaves out the resource "pods", because pods are counted.
func amountsOf(list corev1.ResourceList) amounts {
	var a amounts
	for name, quantity := range list {
		switch name {
		case corev1.ResourceCPU:
			a.milliCPU = quantity.MilliValue()
		case corev1.ResourceMemory:
			a.memory = quantity.Value()
		case corev1.ResourceEphemeralStorage:
			a.storage = quantity.Value()
		case corev1.ResourcePods:
		default:
			if value := quantity.Value(); value != 0 {
				a.set(name, value)
			}
		}
	}
	return a
}

// set sets an amount that has no field of its own.
func (a *amounts) set(name corev1.ResourceName, value int64) {
	if a.others == nil {
		a.others = map[corev1.ResourceName]int64{}
	}
	a.others[name] = value
}

// add adds b multiplied by factor, which may be negative.
func (a *amounts) add(b amounts, factor int64) {
	a.milliCPU += factor * b.milliCPU
	a.memory += factor * b.memory
	a.storage += factor * b.storage
	for name, value := range b.others {
		if sum := a.others[name] + factor*value; sum != 0 {
			a.set(name, sum)
		} else {
			delete(a.others, name)
		}
	}
}

// raiseTo raises each amount to at least the amount in b.
func (a *amounts) raiseTo(b amounts) {
	a.milliCPU, a.memory, a.storage = max(a.milliCPU, b.milliCPU), max(a.memory, b.memory), max(a.storage, b.storage)
	for name, value := range b.others {
		if value > a.others[name] {
			a.set(name, value)
		}
	}
}

// quantity returns the amount of one resource.
func (a amounts) quantity(name corev1.ResourceName) resource.Quantity {
	switch name {
	case corev1.ResourceCPU:
		return *resource.NewMilliQuantity(a.milliCPU, resource.DecimalSI)
	case corev1.ResourceMemory:
		return *resource.NewQuantity(a.memory, resource.BinarySI)
	case corev1.ResourceEphemeralStorage:
		return *resource.NewQuantity(a.storage, resource.BinarySI)
	}
	if strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
		return *resource.NewQuantity(a.others[name], resource.BinarySI)
	}
	return *resource.NewQuantity(a.others[name], resource.DecimalSI)
}

// list returns the amounts that are not zero, and the number of pods.
func (a amounts) list(pods int64) corev1.ResourceList {
	list := corev1.ResourceList{}
	names := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}
	for name := range a.others {
		names = append(names, name)
	}
	for _, name := range names {
		if quantity := a.quantity(name); !quantity.IsZero() {
			list[name] = quantity
		}
	}
	if pods != 0 {
		list[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	}
	return list
}

// podRequests returns the resource requests of a pod: the sum over its containers or the highest demand during its
// initialisation, whichever is greater, plus the overhead of its runtime. Requests at pod level replace the requests of
// the containers.
func podRequests(spec *corev1.PodSpec) amounts {
	var sum, sidecars, initPeak amounts
	for i := range spec.Containers {
		sum.add(amountsOf(spec.Containers[i].Resources.Requests), 1)
	}
	for i := range spec.InitContainers {
		container := &spec.InitContainers[i]
		requested := amountsOf(container.Resources.Requests)
		if container.RestartPolicy != nil && *container.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			// A sidecar keeps running beside all later containers.
			sidecars.add(requested, 1)
			sum.add(requested, 1)
			requested = amounts{}
		}
		requested.add(sidecars, 1)
		initPeak.raiseTo(requested)
	}
	sum.raiseTo(initPeak)
	if spec.Resources != nil {
		sum.override(spec.Resources.Requests)
	}
	sum.add(amountsOf(spec.Overhead), 1)
	return sum
}

// override sets the amounts of the resources in list.
func (a *amounts) override(list corev1.ResourceList) {
	values := amountsOf(list)
	for name := range list {
		switch name {
		case corev1.ResourceCPU:
			a.milliCPU = values.milliCPU
		case corev1.ResourceMemory:
			a.memory = values.memory
		case corev1.ResourceEphemeralStorage:
			a.storage = values.storage
		case corev1.ResourcePods:
		default:
			a.set(name, values.others[name])
		}
	}
}
