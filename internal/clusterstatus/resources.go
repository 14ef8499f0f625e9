package clusterstatus

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// amounts has a quantity of each resource: CPU in thousandths, memory and ephemeral storage in bytes, others in units.
// The resources that nearly every pod and node has are fields, to save memory.
type amounts struct {
	milliCPU, memory, ephemeralStorage int64
	// others is nil for most pods. The map of a counted pod or node is never changed.
	others map[corev1.ResourceName]int64
}

// extraBytes returns the memory that a needs besides the struct.
func (a amounts) extraBytes() int {
	if a.others == nil {
		return 0
	}
	const mapBytes, entryBytes = 256, 32 // estimates for a small map, and for each of its entries
	sum := mapBytes
	for name := range a.others {
		sum += entryBytes + len(name)
	}
	return sum
}

// toAmounts converts a resource list. It leaves out "pods", which load and node have as a number.
func toAmounts(list corev1.ResourceList) amounts {
	var a amounts
	for name, quantity := range list {
		switch name {
		case corev1.ResourceCPU:
			a.milliCPU = quantity.MilliValue()
		case corev1.ResourceMemory:
			a.memory = quantity.Value()
		case corev1.ResourceEphemeralStorage:
			a.ephemeralStorage = quantity.Value()
		case corev1.ResourcePods:
		default:
			if value := quantity.Value(); value != 0 {
				a.setOther(name, value)
			}
		}
	}
	return a
}

// setOther sets an amount that has no field of its own.
func (a *amounts) setOther(name corev1.ResourceName, value int64) {
	if a.others == nil {
		a.others = map[corev1.ResourceName]int64{}
	}
	a.others[name] = value
}

// add adds b multiplied by factor, which may be negative.
func (a *amounts) add(b amounts, factor int64) {
	a.milliCPU += factor * b.milliCPU
	a.memory += factor * b.memory
	a.ephemeralStorage += factor * b.ephemeralStorage
	for name, value := range b.others {
		if sum := a.others[name] + factor*value; sum != 0 {
			a.setOther(name, sum)
		} else {
			delete(a.others, name)
		}
	}
}

// raiseTo raises each amount to at least the amount in b.
func (a *amounts) raiseTo(b amounts) {
	a.milliCPU, a.memory, a.ephemeralStorage = max(a.milliCPU, b.milliCPU), max(a.memory, b.memory), max(a.ephemeralStorage, b.ephemeralStorage)
	for name, value := range b.others {
		if value > a.others[name] {
			a.setOther(name, value)
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
		return *resource.NewQuantity(a.ephemeralStorage, resource.BinarySI)
	}
	if strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
		return *resource.NewQuantity(a.others[name], resource.BinarySI)
	}
	return *resource.NewQuantity(a.others[name], resource.DecimalSI)
}

// toResourceList converts the amounts that are not zero, and adds the number of pods if it is not zero.
func (a amounts) toResourceList(pods int64) corev1.ResourceList {
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
		sum.add(toAmounts(spec.Containers[i].Resources.Requests), 1)
	}
	for i := range spec.InitContainers {
		container := &spec.InitContainers[i]
		requested := toAmounts(container.Resources.Requests)
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
	sum.add(toAmounts(spec.Overhead), 1)
	return sum
}

// override sets the amounts of the resources in list.
func (a *amounts) override(list corev1.ResourceList) {
	values := toAmounts(list)
	for name := range list {
		switch name {
		case corev1.ResourceCPU:
			a.milliCPU = values.milliCPU
		case corev1.ResourceMemory:
			a.memory = values.memory
		case corev1.ResourceEphemeralStorage:
			a.ephemeralStorage = values.ephemeralStorage
		case corev1.ResourcePods:
		default:
			a.setOther(name, values.others[name])
		}
	}
}
